"""``trtllm-build --plugin tokenweave``: the weave inside TensorRT-LLM's own build, and the only contact with it.

TensorRT-LLM is imported when a build starts, not before; every name of it that is touched is listed in
:mod:`~trtllm_tokenweave.trtllm.surface` and looked for first.
"""
