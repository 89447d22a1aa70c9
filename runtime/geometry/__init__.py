"""Small geometry in NumPy: crops, cameras, rotations, MHR's kinematics and skinning."""
