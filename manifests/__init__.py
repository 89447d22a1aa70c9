"""Pinned sources and known answers: what this tool itself says is official."""
