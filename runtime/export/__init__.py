"""Write results as files: safetensors, glTF, OBJ, PLY, an overlay on the photo."""
