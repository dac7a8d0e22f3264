"""Plugins: what a run can do without, a folder for each, which can be deleted. docs/plugins/README.md."""
