"""The kernels that find, choose and move KV rows: CUDA C++ in `kernels`, its host twin, and the NumPy oracle.

Imports only the standard library, NumPy and (lazily) cuda-python; it knows nothing of sessions or engines.

- `host`: the typed API over the kernels compiled for the CPU; what the torch engine calls.
- `oracle`: the same operations in plain Python, written to be obviously right; what the tests compare with.
- `nvrtc`: compiles the same kernel sources to cubin for a GPU.
"""
