"""The commands of ``trtllm-tokenweave``: one module each, put together in `app`."""
