"""The subcommands of `codetta`, one module each; see codetta.cli."""
