"""What a dry run tells of the rows it was given."""

from __future__ import annotations

from typing import Any

from helpers import LAYOUT, Ids, prompt_of

from extractor.core.admission import Admission, Room
from extractor.core.request import Limits, dump_bytes
from extractor.core.row_policy import Policy
from extractor.pipeline.forecast import SAMPLED, DryRun, Forecast, Speed
from extractor.shards.format import MAX_ROOM_BYTES, header_room, sample_bytes, samples_that_fit
from prompts.types import BadRow, RowOrigin, RowReason

LIMITS = Limits(max_prompt_tokens=1000, vocab_size=5000, chunk_tokens=64)
GENEROUS = 1 << 40


def forecast_of(
    lengths: list[int], *, budget: int = GENEROUS, known: bool = True, **changes: Any
) -> Forecast:
    room = Room(layout=LAYOUT, budget_bytes=budget) if known else None
    limits = LIMITS if known else None
    values: dict[str, Any] = {
        "num_held": 4,
        "shard_bytes": 1 << 20,
        "num_movers": 2,
        **changes,
    }
    forecast = Forecast(
        admission=Admission(Policy(), limits, room), limits=limits, room=room, **values
    )
    for ordinal, length in enumerate(lengths):
        mask = (0, *[1] * (length - 1))
        forecast.add(prompt_of(Ids(ids=(7,) * length, mask=mask), ordinal=ordinal))
    return forecast


def test_counts_tokens_and_reasons_add_up() -> None:
    forecast = forecast_of([5, 1001, 1])
    forecast.add(
        BadRow(
            ordinal=3,
            origin=RowOrigin(source="a", line=4),
            label=None,
            reason=RowReason.BAD_JSON,
            detail="x",
        )
    )
    assert (forecast.rows.total, forecast.rows.num_prompts, forecast.rows.num_tokens) == (4, 2, 6)
    assert forecast.rows.by_reason == {"too_long": 1, "bad_json": 1}
    assert (forecast.rows.trained_tokens, forecast.rows.untrained) == (4, 1)


def test_quantiles_are_lengths_that_so_many_prompts_do_not_exceed() -> None:
    forecast = forecast_of([*range(1, 101)])
    assert forecast.rows.quantiles() == {"min": 1, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert forecast_of([]).rows.quantiles() == {}


def test_bytes_are_those_of_samples_and_headers() -> None:
    forecast = forecast_of([10, 20])
    data = sample_bytes(10, LAYOUT) + sample_bytes(20, LAYOUT)
    assert forecast.num_shards == 2  # one for each mover
    assert forecast.output_bytes == data + 2 * header_room(1, LAYOUT)
    many = forecast_of([500] * 100)
    assert many.num_shards == -(-100 * sample_bytes(500, LAYOUT) // (1 << 20))


def test_a_shard_of_tiny_samples_ends_with_its_header() -> None:
    per_shard = samples_that_fit(MAX_ROOM_BYTES, LAYOUT)
    forecast = forecast_of([2], shard_bytes=GENEROUS)
    forecast.rows.lengths[2] += 2 * per_shard
    assert forecast.num_shards == 3


def test_the_peak_is_the_largest_dumps_that_can_lie_there_together_within_the_budget() -> None:
    largest = [900, 800, 700, 600]
    forecast = forecast_of([10, *largest, 20])
    expected = sum(dump_bytes(length, LAYOUT, LIMITS) for length in largest)
    assert forecast.shm_peak_bytes == expected
    assert forecast_of([10, *largest], budget=250_000).shm_peak_bytes == 250_000


def test_the_sample_is_bounded_and_fair_enough_to_hold_late_rows() -> None:
    forecast = forecast_of([4] * (4 * SAMPLED))
    assert len(forecast.sample.prompts) == SAMPLED
    assert max(prompt.ordinal for prompt in forecast.sample.prompts) > 2 * SAMPLED


def test_unknown_figures_are_null_and_the_text_says_why() -> None:
    forecast = forecast_of([5, 6], known=False)
    result = DryRun(forecast=forecast, speed=None, free_bytes=1, why_no_speed="nobody there.")
    document = result.to_document()
    for name in ("bytes", "shards", "shm_peak_bytes", "tokens_per_s", "eta_s"):
        assert document[name] is None
    text = result.to_text()
    assert "Bytes are not known: that takes a server with the plugin" in text
    assert "The time is not known: nobody there." in text


def test_the_time_comes_from_the_measured_speed_and_a_full_disk_is_reported() -> None:
    speed = Speed(tokens_per_s=3.0, num_prompts=9, seconds=5.0)
    forecast = forecast_of([100] * 90)
    result = DryRun(forecast=forecast, speed=speed, free_bytes=10, why_no_speed="")
    assert result.to_document()["eta_s"] == 3000.0
    text = result.to_text()
    assert "50 min" in text
    assert "Measured with 9 of the prompts in 5.0 s" in text
    assert "That does not fit: free space" in text
