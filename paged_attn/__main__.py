"""``python -m paged_attn COMMAND``: the commands are the modules of ``paged_attn.cli``."""

import argparse
import importlib
import sys

COMMANDS = {
    "info": "version, build, devices, and what each op runs on here",
    "generate": "generate text for several prompts at once through the paged cache",
    "plan": "how many sequences a memory budget holds, and what each block size wastes",
    "serve-bench": "serve a trace of request lengths and report throughput, latency and memory",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m paged_attn", description="Paged KV cache and paged attention.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if argv[:1] == [name]:  # only the command that runs is imported: the others may need extras
            module = importlib.import_module(f"paged_attn.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(main=module.main)
    args = parser.parse_args(argv)
    return args.main(args)


if __name__ == "__main__":
    sys.exit(main())
