"""The commands of the command line, one module each: options in, text out."""
