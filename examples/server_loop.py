"""A server in miniature: clients come and go while one loop steps the engine and hands out tokens as they appear."""

import queue
import threading
from collections.abc import Iterator

from _tiny_llama import default_device, tiny_llama

from paged_attn.engine import Engine, SamplingParams


class Server:
    """One thread owns the engine; clients talk to it through queues."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.inbox: queue.Queue = queue.Queue()
        self.clients: dict[int | str, queue.Queue] = {}
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """Tokens of one request, ``ValueError`` if the engine refuses it; leaving the loop early cancels it."""
        outbox: queue.Queue = queue.Queue()
        self.inbox.put(("add", outbox, prompt, params))
        try:
            while (token := outbox.get()) is not None:
                if isinstance(token, ValueError):
                    raise token
                yield token
        finally:
            self.inbox.put(("cancel", outbox))

    def close(self) -> None:
        self.inbox.put(("close",))
        self.thread.join()

    def _loop(self) -> None:
        while True:
            while self.engine.has_work and self.inbox.empty():
                for output in self.engine.step():
                    client = self.clients[output.request_id]
                    for token in output.token_ids:
                        client.put(token)
                    if output.completion:
                        client.put(None)
                        del self.clients[output.request_id]
            match self.inbox.get():
                case "add", outbox, prompt, params:
                    try:
                        self.clients[self.engine.add_request(prompt, params)] = outbox
                    except ValueError as refused:  # the client's affair, not the server's
                        outbox.put(refused)
                case "cancel", outbox:
                    for request_id in [i for i, client in self.clients.items() if client is outbox]:
                        self.engine.cancel(request_id)
                case ("close",):
                    return


def main(device: str = default_device()) -> dict[int, list[int]]:
    server = Server(Engine(tiny_llama(device), num_blocks=64, block_size=8, max_num_seqs=8))
    answers: dict[int, list[int]] = {}

    def client(i: int) -> None:
        answers[i] = []
        for token in server.stream(list(range(10 + i, 30 + i)), SamplingParams(max_tokens=10 + i)):
            answers[i].append(token)
            if i == 3 and len(answers[i]) == 4:
                break  # an impatient client

    clients = [threading.Thread(target=client, args=(i,)) for i in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    server.close()
    for i in sorted(answers):
        print(f"client {i}: {len(answers[i])} tokens")
    return answers


if __name__ == "__main__":
    main()
