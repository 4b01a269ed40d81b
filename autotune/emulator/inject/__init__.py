"""Code inside the training processes: this folder is put on PYTHONPATH, and Python imports
`sitecustomize` from it.

Standard library and torch only, for any Python from 3.9 on: autotune itself may be absent there.
"""
