"""Adapters to other libraries; imported by the user, never by ``paged_attn`` itself."""
