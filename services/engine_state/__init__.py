"""An engine's state in shared memory: written beside each step by whoever runs the engine, read by its sidecar.

`FORMAT.md` describes the file. `layout` and `writer` need nothing but numpy, and nothing from outside this folder, so
that they can be shipped into an engine's own environment as they are.
"""
