"""A small typed layer over libggml: libraries, devices, weights and graphs.

    library = load_library()
    with open_backend(library, "cpu", threads=2) as backend:
        builder = GraphBuilder(Arena(backend), "example")
        x = builder.input("x", (2, 8))
        builder.output("y", builder.relu(x))
        y = builder.build().run({"x": array})["y"]

Shapes are in PyTorch order everywhere in Python and reversed only where libggml is called.
"""
