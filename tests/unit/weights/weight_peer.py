"""A process at the other end of a transport: says that it is ready, then reads pickled commands and answers them.

("receive", update, options, stop_after)   open the update, copy every tensor; stop_after: end the process after so many
("fail", update, options, stop_after)      the same, but raise inside the engine's loop
("stage", tensors, transport, die_at)      stage as a trainer and answer with the update
("send",)                                  send what is staged; SIGKILL itself when tensor `die_at` is read for sending
"""

import itertools
import os
import pickle
import signal
import sys

import torch
from weight_helpers import DictSource

from roll.weights import Sender, open_update


class MortalSource(DictSource):
    """Ends this process during its second iteration, which is the one that `broadcast` sends from."""

    def __init__(self, tensors, die_at):
        super().__init__(tensors)
        self.die_at = die_at
        self.iterations = 0

    def __iter__(self):
        self.iterations += 1
        for number, item in enumerate(self.tensors.items()):
            if self.iterations == 2 and number == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def receive(update, options, stop_after, fail):
    taken = []
    with open_update(update, **options) as receiver:
        for number, (name, tensor) in zip(itertools.count(), receiver):
            if number == stop_after:
                if fail:
                    raise ValueError(f"the engine refuses {name}")
                os._exit(17)
            taken.append((name, tensor.clone()))
    return taken, receiver.checksums


def main():
    torch.set_num_threads(1)
    sender = Sender(bucket_bytes=100_000, timeout_s=20)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get into the answers
    pickle.dump("ready", answers)
    answers.flush()
    while True:
        try:
            command, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if command == "stage":
                tensors, transport, die_at = arguments
                answer = sender.stage(MortalSource(tensors, die_at), 1, transport)
            elif command == "send":
                answer = sender.send()
            else:
                answer = receive(*arguments, fail=command == "fail")
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
