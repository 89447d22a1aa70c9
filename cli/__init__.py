"""The commands: thin Typer apps over functions that a Python user can call."""
