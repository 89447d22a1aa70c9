"""SAM 3D Objects: from a photo, a mask and depth to Gaussians and a mesh."""
