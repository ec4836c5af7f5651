"""An engine's state in shared memory: the engine's process writes it at each step, its sidecar reads it.

`FORMAT.md` describes the file. `identity`, `layout`, `process`, `writer` and `xargs` import only numpy and each other,
because the vLLM plug-in is built with them.
"""
