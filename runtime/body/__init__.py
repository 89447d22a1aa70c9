"""SAM 3D Body: from a photo to posed meshes."""
