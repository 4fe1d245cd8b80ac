"""Sub-commands of ``python -m paged_attn``; each module offers ``add_arguments(parser)`` and ``main(args)``."""
