"""Runs that end in files: photos to results, parameters to meshes."""
