"""Write results as files: safetensors, glTF, OBJ, an overlay on the photo."""
