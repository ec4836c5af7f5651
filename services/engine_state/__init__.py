"""An engine's state in shared memory: its process writes the file at each step, its sidecar reads it.

`FORMAT.md` describes the file. `layout`, `process` and `writer` need numpy only, and no module outside of this folder,
so that the vLLM plug-in can be built from the same source.
"""
