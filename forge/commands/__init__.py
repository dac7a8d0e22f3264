"""The subcommands of `forge`."""
