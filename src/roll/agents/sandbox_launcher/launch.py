"""Runs an agent program in the sandbox, with the standard library only; the endpoint is its only connection.

    agent ──TCP, the sandbox's own loopback──► this module ──Unix socket of the host──► endpoint

Arguments: the socket, the file with the program's answer (empty: none), then the program with its arguments. The answer
is written to file descriptor 3. An environment variable `ROLL_PORT_VARIABLE_NAME` is passed to the program as `NAME`,
with `{}` in its value replaced by the port.
"""

import asyncio
import os
import sys

PORT_VARIABLE_PREFIX = "ROLL_PORT_VARIABLE_"
CHUNK_BYTES = 65536
MAX_ANSWER_BYTES = 2**20


async def forward(reader, writer):
    """Copy data from `reader` to `writer` until the end of the stream, then send the end of the stream to `writer`."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


async def main(socket, answer_file, *command):
    """Run the program, and forward its connections to the endpoint until it ends; return its exit code."""

    async def forward_connection(reader, writer):
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(socket)
        except OSError:
            writer.close()
            return
        await asyncio.gather(forward(reader, far_writer), forward(far_reader, writer))
        writer.close()
        far_writer.close()

    server = await asyncio.start_server(forward_connection, "127.0.0.1", 0)
    port = str(server.sockets[0].getsockname()[1])
    variables = {
        name.removeprefix(PORT_VARIABLE_PREFIX): os.environ.pop(name).replace("{}", port)
        for name in list(os.environ)
        if name.startswith(PORT_VARIABLE_PREFIX)
    }
    try:
        program = await asyncio.create_subprocess_exec(*command, env={**os.environ, **variables})
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    code = await program.wait()
    if answer_file:
        write_answer(answer_file)
    return code


def write_answer(path):
    """Copy the file with the answer to file descriptor 3, if the file exists."""
    try:
        with open(path, "rb") as file, os.fdopen(3, "wb") as result:
            result.write(file.read(MAX_ANSWER_BYTES))
    except OSError:
        pass


if __name__ == "__main__":
    code = asyncio.run(main(*sys.argv[1:]))
    sys.exit(128 - code if code < 0 else code)  # as a shell reports the end by a signal
