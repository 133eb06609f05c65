"""The command line is a contract: exit codes, streams, signals, help."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from helpers import (
    assert_whole,
    dumps_under,
    make_prompts,
    stored_ordinals,
    write_prompts,
)

from acceptance.tool import PATIENCE_S, REPOSITORY, Fake, Tool, fake_server, wait_until
from extractor.cli import option_types
from extractor.cli.console import console
from extractor.cli.main import cli, main
from extractor.cli.option_types import BYTES, SECONDS, GivenPath, OneOf
from extractor.system.signals import STOP_SIGNALS
from prompts.ambient import parse_moment

pytestmark = pytest.mark.timeout(120)

COMMANDS = sorted(cli.commands)


@pytest.fixture
def prompts_path(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "p.jsonl", make_prompts(12))


@pytest.mark.slow
def test_an_interrupt_while_the_command_is_still_being_imported_is_130(tmp_path: Path) -> None:
    """The import takes a second: here Ctrl-C comes in the midst of it."""
    (tmp_path / "tqdm.py").write_text("raise KeyboardInterrupt\n")
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": python_path}
    command = shutil.which("extractor", path=Path(sys.executable).parent) or "extractor"

    def told_by(*arguments: str) -> str:
        ran = subprocess.run([command, *arguments], env=environment, capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (130, "")
        return ran.stderr

    assert told_by("--help") == "interrupted\n"
    assert told_by("run", "p.jsonl", "--log-json") == "interrupted\n"  # no option is read yet


@pytest.mark.slow
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_the_command_is_still_being_imported_is_130(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A module that is never imported to its end stands for slow ones; it swallows exceptions."""
    (tmp_path / "tqdm.py").write_text(
        "import signal\n"
        "print('importing', flush=True)\n"
        "while True:\n"
        "    try:\n"
        "        signal.pause()\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", "extractor", "--help"],
        env={**os.environ, "PYTHONPATH": python_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(number)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors == "interrupted\n"


# --- exit codes -------------------------------------------------------------------------------


@pytest.mark.slow
def test_done_and_clean_is_0(tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path) -> None:
    ran = tool.run(prompts_path, tmp_path / "out", fake)
    assert ran.returncode == 0
    # One line of what is extracted from where; nothing else, for nothing went wrong.
    (line,) = ran.stderr.splitlines()
    assert line == (
        f"fake/model at {fake.url}: boundaries [1, 2, 3], last post, BF16; "
        "12 rows, 0 settled before"
    )
    assert "rows in all" in ran.stdout
    verified = tool("verify", "out")
    assert verified.returncode == 0
    assert verified.stdout.rstrip().endswith("clean")
    status = tool("status", "out")
    assert (status.returncode, status.stdout.splitlines()[0]) == (0, "out: done")


@pytest.mark.slow
def test_the_defaults_work_with_no_option(tmp_path: Path, tool: Tool, prompts_path: Path) -> None:
    """`extractor run p.jsonl` and `extractor verify`; options come by variable."""
    root = tmp_path / "dumps"
    with fake_server(root) as server:
        tool.environment = {
            "EXTRACTOR_RUN_SERVER": server.url,
            "EXTRACTOR_RUN_DUMP_DIR": str(root),
            "EXTRACTOR_RUN_TOKENIZER": "none",
        }
        assert tool("run", prompts_path).returncode == 0
    assert tool("verify").returncode == 0
    assert_whole(tmp_path / "extraction", make_prompts(12))


@pytest.mark.slow
@pytest.mark.parametrize("between", [",", " ", " , "])
def test_several_servers_are_named_by_the_option_again_or_in_one_variable(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path, between: str
) -> None:
    with fake_server(fake.root) as other:
        urls = [fake.url, other.url]
        tool.environment = {"EXTRACTOR_RUN_SERVER": between.join(urls)}
        by_variable = tool(
            "run", prompts_path, "--out", tmp_path / "a", "--dump-dir", fake.root,
            "--tokenizer", "none", "--json",
        )  # fmt: skip
        by_option = tool.run(
            prompts_path, tmp_path / "b", fake, "--server", other.url, "--json",
            "--concurrency", "auto",
        )  # fmt: skip
    for done in (by_variable, by_option):
        assert done.returncode == 0, done.stderr
        servers = done.json()["session"]["servers"]
        assert [server["url"] for server in servers] == urls
        assert [server["concurrency_is"] for server in servers] == ["auto", "auto"]


@pytest.mark.slow
def test_failed_rows_are_1_and_named_on_stderr(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    with prompts_path.open("a") as file:
        file.write("{broken\n")
    ran = tool.run(prompts_path, tmp_path / "out", fake)
    assert ran.returncode == 1
    assert f"{prompts_path}:13: bad_json: " in ran.stderr
    assert "bad_json" in ran.stdout
    assert tool("verify", "out").returncode == 0  # the data set itself is sound
    status = tool("status", "out", "--json").json()
    assert [(row["line"], row["reason"]) for row in status["failed_rows"]] == [(13, "bad_json")]


@pytest.mark.slow
def test_findings_are_1(tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path) -> None:
    tool.run(prompts_path, tmp_path / "out", fake)
    (tmp_path / "out" / "shards" / "shard-000000.safetensors").unlink()
    verified = tool("verify", "out")
    assert verified.returncode == 1
    assert "FINDING  shard_missing: 1" in verified.stdout
    document = tool("verify", "out", "--json")
    assert document.returncode == 1
    assert document.json()["clean"] is False
    assert [finding["kind"] for finding in document.json()["findings"]] == ["shard_missing"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "Missing argument"),
        (["run", "nowhere.jsonl"], "no such file"),
        (["run", "p.jsonl", "--concurrency", "0"], "--concurrency"),
        (["run", "p.jsonl", "--shm-budget", "lots"], "is no size"),
        (["run", "p.jsonl", "--dump-timeout", "0"], "--dump-timeout must be >="),
        (["run", "p.jsonl", "--nonsense"], "No such option"),
        (["run", "p.jsonl", "--", "--tp", "8"], "--model"),
        (["verify", "nowhere"], "no manifest there"),
        (["status", "nowhere"], "no manifest there"),
        (["serve", "--model", "m", "--", "--port", "1"], "give --port to `extractor serve`"),
        (["serve", "--model", "m", "--layers", "one"], "one"),
        (["serve", "--model", "m", "--host", "256.1.1.1"], "--host '256.1.1.1'"),
        (["serve", "--model", "m", "--host", "192.0.2.7", "--port", "0"], "cannot listen there"),
        (["run", "p.jsonl", "--server", "http://256.1.1.1"], "an IPv6 address in brackets"),
        (["run", "p.jsonl", "--server", "http://[::1"], "an IPv6 address in brackets"),
        (["run", "p.jsonl", "--server", "http://host:99999"], "an IPv6 address in brackets"),
        (["run", "p.jsonl", "--server", "http://-x-/"], "an IPv6 address in brackets"),
        (["run", "p.jsonl", "--request-timeout", "inf"], "--request-timeout"),
        (["run", "p.jsonl", "--max-tokens", "9" * 20], "--max-tokens"),
        (["run", "p.jsonl", "--out", ""], "is a shell variable not set?"),
        (["nonsense"], "No such command"),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_2_with_a_message_and_no_traceback(
    tmp_path: Path,
    prompts_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, because it is about the messages and a process costs seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["extractor", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == 2, shown.err
    assert message in shown.err
    assert shown.out == ""


def parameters_of_commands(*kinds: type | click.ParamType[Any]) -> list[Any]:
    """Those of these types: a class, or one object."""
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    return [
        pytest.param(parameter, id=f"{name}-{parameter.name}")
        for name, command in cli.commands.items()
        for parameter in command.params
        if isinstance(parameter.type, classes) or parameter.type in kinds
    ]


def refusal(parameter: click.Parameter, value: str) -> str:
    """The message for a value that must not be taken."""
    context = click.Context(cli.commands["run"])
    with pytest.raises(click.BadParameter) as caught:
        parameter.type.convert(value, parameter, context)
    assert caught.value.exit_code == 2
    return caught.value.format_message()


@pytest.mark.parametrize("parameter", parameters_of_commands(click.ParamType))
def test_no_option_takes_an_empty_value(parameter: click.Parameter) -> None:
    """As `--out "$UNSET"` gives it: the current directory, or a default that was not meant."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return
    context = click.Context(cli.commands["run"])
    assert refusal(parameter, "").startswith(
        f"Invalid value for {parameter.get_error_hint(context)}: "
    )


@pytest.mark.parametrize(
    "parameter", parameters_of_commands(click.IntRange, click.types.IntParamType, BYTES)
)
def test_every_whole_number_has_an_upper_bound(parameter: click.Parameter) -> None:
    for value in ("9" * 20, "9" * 5000):
        assert parameter.opts[-1] in refusal(parameter, value)


@pytest.mark.parametrize("parameter", parameters_of_commands(SECONDS, click.types.FloatParamType))
def test_every_time_has_an_upper_bound(parameter: click.Parameter) -> None:
    for value in ("inf", "nan", "1e400", "1e9", "-1", "x"):
        assert f"{parameter.opts[-1]}': '{value}' is not a number of seconds" in refusal(
            parameter, value
        )


@pytest.mark.slow
def test_a_wrong_command_ends_the_process_with_2(tool: Tool) -> None:
    result = tool("run", "nowhere.jsonl")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("extractor: nowhere.jsonl: no such file")


@pytest.mark.slow
def test_another_configuration_is_2_naming_the_field(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    tool.run(prompts_path, tmp_path / "out", fake)
    write_prompts(prompts_path, make_prompts(13))
    again = tool.run(prompts_path, tmp_path / "out", fake)
    assert again.returncode == 2
    assert "\n  inputs: " in again.stderr


def test_no_server_is_3_with_what_to_do(tool: Tool, prompts_path: Path) -> None:
    result = tool("run", prompts_path, "--server", "http://127.0.0.1:9")
    assert result.returncode == 3
    assert "extractor serve" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_wrong_dump_dir_is_2(tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path) -> None:
    elsewhere = Fake(url=fake.url, root=tmp_path / "elsewhere", process=fake.process)
    result = tool.run(prompts_path, tmp_path / "out", elsewhere)
    assert result.returncode == 2
    assert "--dump-dir" in result.stderr
    assert "elsewhere does not exist" in result.stderr


def test_a_server_without_plugin_is_3(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    """The dump directory is valid, since another server, now dead, has dumped there."""
    with fake_server(tmp_path / "other") as other:
        pass
    elsewhere = Fake(url=fake.url, root=other.root, process=fake.process)
    result = tool.run(prompts_path, tmp_path / "out", elsewhere)
    assert result.returncode == 3
    assert "SGLANG_HS_DUMP_DIR" in result.stderr


@pytest.mark.slow
def test_a_private_certificate_is_named_and_accepted_by_its_variable(
    tmp_path: Path, tool: Tool, dump_root: Path, certificate: Path, prompts_path: Path
) -> None:
    with fake_server(dump_root, "--host", "::1", "--tls", str(certificate)) as server:
        assert server.url.startswith("https://[::1]:")
        refused = tool.run(prompts_path, tmp_path / "out", server, "--server-wait", 3600)
        assert refused.returncode == 2
        assert "certificate is not trusted" in refused.stderr
        assert "SSL_CERT_FILE" in refused.stderr
        tool.environment = {"SSL_CERT_FILE": str(certificate)}
        well = tool("doctor", "--server", server.url, "--dump-dir", dump_root)
        assert well.returncode == 0, well.stdout
        assert tool.run(prompts_path, tmp_path / "out", server).returncode == 0
    assert_whole(tmp_path / "out", make_prompts(12))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 70 MB; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=70m", "none", str(disk)], capture_output=True
    )
    if made.returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_4_and_the_same_command_goes_on_once_there_is_room(
    small_disk: Path, tmp_path: Path, tool: Tool, dump_root: Path
) -> None:
    with fake_server(dump_root, "--delay-s", "0.05") as fake:
        fill_and_resume(small_disk, tmp_path, tool, fake)


def fill_and_resume(small_disk: Path, tmp_path: Path, tool: Tool, fake: Fake) -> None:
    prompts = make_prompts(40, shortest=3500, longest=4000)  # 10 MB of states
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out = small_disk / "out"
    # Enough is free when the run begins; then somebody else takes nearly all of it.
    process = tool.start_run(path, out, fake, "--concurrency", 1)
    wait_until(lambda: out.joinpath("shards", ".shard-000000.open").exists(), what="a shard begun")
    fill = small_disk / "fill"
    with fill.open("wb", buffering=0) as file, suppress(OSError):
        while shutil.disk_usage(small_disk).free > 2_000_000:
            file.write(bytes(1_000_000))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 4, errors
    assert "free space" in errors.lower()
    assert "Traceback" not in errors
    assert dumps_under(fake.root) == []
    kept = stored_ordinals(out)
    assert len(kept) < 40
    fill.unlink()
    # Room for the rest, though no longer for the caution at the start of a run.
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    again = tool.run(path, moved, fake)
    assert again.returncode == 0, again.stderr
    assert_whole(moved, prompts)


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
def test_a_port_that_is_none_is_2(tool: Tool, port: str) -> None:
    done = tool("serve", "--model", "m", "--port", port)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# --- signals ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_lets_what_is_in_flight_end(
    tmp_path: Path, tool: Tool, dump_root: Path, number: signal.Signals
) -> None:
    prompts = make_prompts(400)  # seconds of work are left when the signal comes
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out = tmp_path / "out"
    with fake_server(dump_root, "--delay-s", "0.05") as server:
        process = tool.start_run(path, out, server)
        wait_until(
            lambda: (out / "manifest.sqlite").exists() and server.requests() >= 40,
            what="40 requests",
        )
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert "the same command goes on" in errors
        rows = tool("status", out, "--json").json()["rows"]
        # Nothing was cut off: what had been sent was stored.
        assert 30 <= rows["stored"] < 400
        assert server.requests() == 1 + rows["stored"]
        assert dumps_under(dump_root) == []
        assert tool.run(path, out, server).returncode == 0
    assert_whole(out, prompts)


@pytest.mark.crash
def test_a_second_signal_stops_at_once(tmp_path: Path, tool: Tool, dump_root: Path) -> None:
    """The server would take a minute to answer; nobody waits for it."""
    prompts = make_prompts(10)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out = tmp_path / "out"
    with fake_server(dump_root, "--fault", "silent", "--fault-every", "3") as server:
        process = tool.start_run(path, out, server)
        wait_until(lambda: server.requests() >= 6, what="silent requests")
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        line = next(text for text in process.stderr if "interrupt again" in text)
        assert line
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
        errors = process.stderr.read()
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert dumps_under(dump_root) == []
    with fake_server(dump_root) as server:
        assert tool.run(path, out, server).returncode == 0
    assert_whole(out, prompts)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_prompt_is_130(
    tmp_path: Path, tool: Tool, prompts_path: Path, number: signal.Signals
) -> None:
    process = tool.start(
        "run", prompts_path, "--server", "http://127.0.0.1:9", "--server-wait", 60, "--out", "out"
    )
    wait_until((tmp_path / "out" / "manifest.sqlite").exists, what="a run waiting for its server")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


@pytest.mark.crash
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("arguments", "spooled"),
    [
        (["run", "--out", "out"], "out/.tmp-*"),
        (["run", "--dry-run", "--tokenizer", "none"], "dry-run-*/.tmp-*"),
        (["show", "--tokenizer", "none"], "show-*/.tmp-*"),
    ],
    ids=["run", "dry-run", "show"],
)
def test_a_signal_ends_a_command_that_waits_for_an_idle_input(
    tmp_path: Path, tool: Tool, number: signal.Signals, arguments: list[str], spooled: str
) -> None:
    tool.environment = {"TMPDIR": str(tmp_path)}
    process = tool.start(*arguments, "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write('{"input_ids": [5, 6, 7]}\n')  # begun, and never ended
    process.stdin.flush()
    wait_until(lambda: list(tmp_path.glob(spooled)) != [], what="the input being kept")
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 130  # with the input open all the while
    _, errors = process.communicate()
    assert errors.strip().removeprefix("extractor: ") == "interrupted"
    assert [*tmp_path.rglob("stdin*"), *tmp_path.glob(spooled)] == []


@pytest.mark.slow
@pytest.mark.crash
def test_a_second_run_says_which_process_has_the_directory(
    tmp_path: Path, tool: Tool, dump_root: Path
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(150))
    out = tmp_path / "out"
    with fake_server(dump_root, "--delay-s", "0.05") as server:
        first = tool.start_run(path, out, server)
        wait_until(lambda: server.requests() >= 5, what="the first run at work")
        first.send_signal(signal.SIGSTOP)  # or it might be done before the second has started
        second = tool.run(path, out, server)
        assert second.returncode == 2
        assert f"process {first.pid}" in second.stderr
        assert tool("status", out, "--json").json()["input_rows"] == 150  # while it is written
        first.kill()
        first.communicate()
        assert tool.run(path, out, server).returncode == 0  # a dead holder holds nothing


# --- streams ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_goes_to_stdout_alone(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    with prompts_path.open("a") as file:
        file.write("{broken\n")
    ran = tool.run(prompts_path, tmp_path / "out", fake, "--json")
    assert ran.json()["rows"] == {
        "planned": 0, "stored": 12, "failed": 1,
    }  # fmt: skip
    assert ran.json()["failed"] == {"bad_json": 1}
    assert ran.json()["session"]["sent"] == 12
    verified = tool("verify", "out", "--json").json()
    assert verified["clean"] is True
    assert verified["input_rows"] == 13
    assert verified["bytes_checked"] == ran.json()["bytes"] == verified["bytes"]
    fast = tool("verify", "out", "--fast", "--json").json()
    assert (fast["clean"], fast["fast"], fast["bytes_checked"]) == (True, True, 0)
    status = tool("status", "out", "--json").json()
    assert (status["unread"], status["rows"]["stored"]) == (0, 12)
    assert all(line.count("{") == 0 for line in ran.stderr.splitlines() if "broken" not in line)


@pytest.mark.slow
def test_a_traceback_is_shown_only_when_asked_for(tool: Tool, prompts_path: Path) -> None:
    command = ["run", prompts_path, "--server", "http://127.0.0.1:9"]
    assert "Traceback" not in tool(*command).stderr
    assert "Traceback" in tool("-v", *command).stderr
    assert "Traceback" in tool(*command, "-v").stderr
    tool.environment = {"EXTRACTOR_VERBOSE": "1"}
    assert "Traceback" in tool(*command).stderr


def test_the_log_names_the_session_with_v_and_each_prompt_with_vv(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    quiet = tool.run(prompts_path, tmp_path / "a", fake)
    assert len(quiet.stderr.splitlines()) == 1
    one = tool.run(prompts_path, tmp_path / "b", fake, "-v").stderr
    assert " INFO extractor.shards.sequence: shard sealed shard=0 samples=12\n" in one
    assert " DEBUG " not in one
    two = tool.run(prompts_path, tmp_path / "c", fake, "-vv").stderr
    assert (
        len(re.findall(r" DEBUG extractor\.shards\.mover: committed rid=xtr-\S+ row=\d+\n", two))
        == 12
    )


def test_the_log_is_objects_among_the_others(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    ran = tool.run(prompts_path, tmp_path / "out", fake, "--log-json", "-vv")
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert lines[-1]["event"] == "finished"
    committed = [line for line in lines if line["message"].startswith("committed rid=")]
    assert len(committed) == 12
    assert {(line["event"], line["level"], line["logger"]) for line in committed} == {
        ("log", "debug", "extractor.shards.mover")
    }


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error_of_ours(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    tool.run(prompts_path, tmp_path / "out", fake)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "extractor", "status", str(tmp_path / "out"), "--json"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


# --- help -------------------------------------------------------------------------------------


def test_help_and_version_are_0(tool: Tool) -> None:
    for arguments in (["-h"], ["--help"], ["run", "-h"]):
        result = tool(*arguments)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("Usage: ")
    assert tool("--version").returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name: str) -> None:
    command = cli.commands[name]
    assert command.help, name
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"


def test_every_option_has_a_variable_of_its_name() -> None:
    for name, command in cli.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                option = parameter.opts[-1].removeprefix("--").replace("-", "_")
                assert parameter.envvar == f"EXTRACTOR_{name}_{option}".upper()


def option_of(command: str, name: str) -> click.Option:
    """The option of that name, of a command or, with "", of `extractor` itself."""
    params = cli.commands[command].params if command else cli.params
    return next(
        option for option in params if isinstance(option, click.Option) and option.name == name
    )


#: A value that is not the default, for options whose type does not give one.
VALUES: dict[str, tuple[str, Any]] = {
    "host": ("::1", "::1"),
    "kwargs": ('{"a": 1}', {"a": 1}),
    "now": ("2026-01-31", parse_moment("2026-01-31")),
    "role_map": ("human=user bot=assistant", {"human": "user", "bot": "assistant"}),
    "server_url": ("http://a:1", "http://a:1"),
    "urls": ("http://a:1, http://b:2", ("http://a:1", "http://b:2")),
    "fields": ("q,a", ("q", "a")),
    "ignored_columns": ("a b", ("a", "b")),
    "concurrency": ("9", 9),
    "dump_owner": ("root", 0),
}


def value_for(option: click.Option, template: Path) -> tuple[str, Any]:
    """A value other than the default, as a variable holds it and as the command gets it."""
    if option.name in VALUES:
        return VALUES[option.name]
    if option.name == "text":
        return str(template), template.read_text()
    if option.is_flag:
        return ("0", False) if option.default is True else ("1", True)
    if option.type is option_types.BY_NAME["file_mode"]:
        return "640", 0o640
    match option.type:
        case OneOf(choices=choices) | click.Choice(choices=choices):
            return choices[-1], choices[-1]
        case click.IntRange():
            return "7", 7
        case option_types.BYTES:
            return "5KiB", 5120
        case option_types.SECONDS:
            return "7.5", 7.5
        case GivenPath():
            return "some/where", Path("some/where")
    return "some-text", "some-text"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, option.name)
        for command in COMMANDS
        for option in cli.commands[command].params
        if isinstance(option, click.Option) and option.name != "verbose"
    ],
)
def test_every_option_is_set_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    template = tmp_path / "template"
    template.write_text("{{ messages }}")
    option = option_of(command, name)
    text, value = value_for(option, template)
    before = parsed(command, name, monkeypatch)
    assert isinstance(option.envvar, str)
    monkeypatch.setenv(option.envvar, text)
    assert parsed(command, name, monkeypatch) == value != before


def parsed(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command gets for an option, without arguments beyond those that it needs."""
    words = {"run": ["p.jsonl"], "show": ["p.jsonl"], "serve": ["--model", "m"]}.get(command, [])
    if (command, name) == ("serve", "model"):
        words = []
    got: dict[str, Any] = {}
    monkeypatch.setattr(cli.commands[command], "callback", lambda *_, **values: got.update(values))
    with suppress(click.MissingParameter):
        cli.main([command, *words], standalone_mode=False)
    return got.get(name)


@pytest.mark.parametrize("command", ["", *COMMANDS])
@pytest.mark.parametrize("verbosity", [1, 2])
def test_verbosity_is_set_by_a_variable_of_each_command_and_of_all(
    monkeypatch: pytest.MonkeyPatch, command: str, verbosity: int
) -> None:
    variable = f"EXTRACTOR_{command}_VERBOSE" if command else "EXTRACTOR_VERBOSE"
    logger = logging.getLogger("extractor")
    try:
        console.reset()
        monkeypatch.setenv(variable.upper(), str(verbosity))
        parsed(command or "status", "verbose", monkeypatch)
        assert console.verbosity == verbosity
        assert logger.level == (logging.INFO, logging.DEBUG)[verbosity - 1]
    finally:
        console.reset()
    assert (logger.level, console.verbosity) == (logging.NOTSET, 0)


@pytest.mark.parametrize(
    ("arguments", "variables", "is_object"),
    [
        (["run", "p.jsonl", "--nonsense", "--log-json"], {}, True),
        (["run", "p.jsonl", "--log-json", "--out"], {}, True),
        (["run", "p.jsonl", "--concurrency", "x"], {"EXTRACTOR_RUN_LOG_JSON": "1"}, True),
        (["run"], {"EXTRACTOR_RUN_LOG_JSON": "1"}, True),
        (["run", "nowhere.jsonl", "--log-json"], {}, True),
        (["run", "p.jsonl", "--nonsense", "--", "--log-json"], {}, False),
        (["status", "run"], {"EXTRACTOR_RUN_LOG_JSON": "1"}, False),
        (["verify", "--nonsense"], {"EXTRACTOR_RUN_LOG_JSON": "1"}, False),
        (["run", "p.jsonl", "--nonsense"], {"EXTRACTOR_RUN_LOG_JSON": "0"}, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_error_is_an_object_where_the_options_of_its_command_say_so(
    tmp_path: Path,
    arguments: list[str],
    variables: dict[str, str],
    is_object: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["extractor", *arguments])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        console.reset()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("{") is is_object, shown.err
    if is_object:
        (line,) = shown.err.splitlines()
        told = json.loads(line)
        assert (told["event"], told["exit_status"]) == ("error", 2)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_shows_every_command(name: str) -> None:
    assert f"extractor {name}" in (REPOSITORY / "README.md").read_text()


@pytest.mark.slow
def test_doctor_names_each_problem_and_ends_with_1(tmp_path: Path, tool: Tool, fake: Fake) -> None:
    well = tool("doctor", "--server", fake.url, "--dump-dir", fake.root)
    assert well.returncode == 0
    assert {line.split()[0] for line in well.stdout.splitlines()} == {"OK"}
    ill = tool("doctor", "--server", "http://127.0.0.1:9", "--dump-dir", tmp_path / "elsewhere")
    assert ill.returncode == 1
    problems = [line for line in ill.stdout.splitlines() if line.startswith("PROBLEM")]
    assert [line.split()[1] for line in problems] == ["dump", "server:"]
    both = tool("doctor", "--server", fake.url, "--server", "http://127.0.0.1:9")
    assert both.returncode == 2
    assert "one server at a time" in both.stderr
    assert dumps_under(fake.root) == []


def test_example_prompts_are_what_the_demo_says() -> None:
    rows = (REPOSITORY / "examples" / "prompts.jsonl").read_text().splitlines()
    broken = 0
    for row in rows:
        try:
            json.loads(row)
        except ValueError:
            broken += 1
    assert len(rows) >= 48
    assert broken == 1


@pytest.mark.parametrize(
    "command", [("run", "p.jsonl", "--tokenizer", "none", "--out"), ("status",), ("verify",)]
)
@pytest.mark.parametrize("out", ["x" * 300, "p.jsonl/out"])
def test_an_out_that_cannot_be_is_told_in_a_line(
    tmp_path: Path, tool: Tool, command: tuple[str, ...], out: str
) -> None:
    rows = tmp_path / "p.jsonl"
    rows.write_text('{"input_ids": [5, 6, 7]}\n')
    words = [tmp_path / word if word == "p.jsonl" else word for word in command]
    ran = tool(*words, tmp_path / out)
    assert ran.returncode == 2, ran.stderr
    assert str(tmp_path / out) in ran.stderr
    assert "Traceback" not in ran.stderr
