"""Tasks about files: find, count, move, pack."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from random import Random

from roll.envs.worlds.terminal_tasks.task import Task, answer, prints, words

__all__ = ["FINDING"]


def find_word(random: Random) -> Task:
    secret, *names = words(random, 9)
    hidden = random.choice(names)
    files = {
        f"notes/{name}/{name}.txt": f"about {name}\n" + (f"the {secret} is here\n" if name == hidden else "")
        for name in names
    }
    text = f"One file below notes/ mentions {secret}. Write its path, beginning with notes/, into answer.txt."
    return Task(
        text=text,
        files=files,
        checks=[answer(f"notes/{hidden}/{hidden}.txt")],
        solution=f"grep -rl {secret} notes > answer.txt",
    )


def find_largest(random: Random) -> Task:
    names = words(random, 6)
    sizes = random.sample(range(10, 400), 6)
    files = {f"data/{name}.bin": "x" * size for name, size in zip(names, sizes, strict=True)}
    largest = names[sizes.index(max(sizes))]
    text = "Write the name (without folder) of the largest file in data/ into answer.txt."
    return Task(text=text, files=files, checks=[answer(f"{largest}.bin")], solution="ls -S data | head -1 > answer.txt")


def count_files(random: Random) -> Task:
    names = words(random, 12)
    count = random.randint(2, 9)
    files = {f"logs/{name}/{i % 3}/{name}.{'log' if i < count else 'txt'}": "line\n" for i, name in enumerate(names)}
    text = "How many files below logs/, at any depth, end in .log? Write the number into answer.txt."
    return Task(text=text, files=files, checks=[answer(count)], solution="find logs -name '*.log' | wc -l > answer.txt")


def rename_extension(random: Random) -> Task:
    names = sorted(words(random, random.randint(3, 6)))
    files = {f"docs/{name}.txt": f"{name}\n" for name in names}
    text = "Rename every .txt file in docs/ so that it ends in .md instead, with its content unchanged."
    listed = "\n".join(f"{name}.md" for name in names)
    checks = [prints("LC_ALL=C ls docs", listed), prints("cat docs/*.md", "\n".join(names))]
    return Task(text=text, files=files, checks=checks, solution='for f in docs/*.txt; do mv "$f" "${f%.txt}.md"; done')


def delete_temporary(random: Random) -> Task:
    names = sorted(words(random, 8))
    count = random.randint(2, 6)
    chosen = set(random.sample(names, count))
    files = {f"work/{name}.{'tmp' if name in chosen else 'dat'}": name for name in names}
    kept = "\n".join(f"{name}.dat" for name in names if name not in chosen)
    text = "Delete the files in work/ that end in .tmp, and no others."
    return Task(text=text, files=files, checks=[prints("LC_ALL=C ls work", kept)], solution="rm work/*.tmp")


def sort_into_folders(random: Random) -> Task:
    names = words(random, 8)
    kinds = {name: random.choice(["csv", "png", "txt"]) for name in names}
    files = {f"inbox/{name}.{kind}": name for name, kind in kinds.items()} | {
        "inbox/a.csv": "a",
        "inbox/b.png": "b",
        "inbox/c.txt": "c",
    }
    kinds |= {"a": "csv", "b": "png", "c": "txt"}
    expected = "\n".join(sorted(f"sorted/{kind}/{name}.{kind}" for name, kind in kinds.items()))
    text = "Move every file of inbox/ into sorted/csv, sorted/png or sorted/txt, by its ending."
    solution = "for k in csv png txt; do mkdir -p sorted/$k; mv inbox/*.$k sorted/$k/; done"
    checks = [prints("find sorted -type f | LC_ALL=C sort", expected), prints("find inbox -type f", "")]
    return Task(text=text, files=files, checks=checks, solution=solution)


def same_content(random: Random) -> Task:
    names = words(random, 8)
    one, two = sorted(random.sample(names, 2))
    files = {f"photos/{name}.raw": f"{random.random()}" for name in names}
    files[f"photos/{two}.raw"] = files[f"photos/{one}.raw"]
    text = "Two files in photos/ have the same content. Write their names, sorted, one a line, into answer.txt."
    solution = "cd photos; md5sum * | sort | uniq -w32 -D | awk '{print $2}' | LC_ALL=C sort > ../answer.txt"
    return Task(text=text, files=files, checks=[answer(f"{one}.raw\n{two}.raw")], solution=solution)


def make_executable(random: Random) -> Task:
    names = sorted(words(random, 3))
    files = {f"bin/{name}.sh": f"#!/bin/bash\necho {name}\n" for name in names}
    text = "The scripts in bin/ cannot be run, as in bin/NAME.sh. Make all of them executable."
    checks = [prints(f"bin/{name}.sh", name) for name in names]
    return Task(text=text, files=files, checks=checks, solution="chmod +x bin/*.sh")


def link_release(random: Random) -> Task:
    numbers = random.sample(range(1, 30), 4)
    files = {f"releases/v{n}/about.txt": f"release {n}\n" for n in numbers}
    text = "Make a symbolic link named current to the release in releases/ with the highest number (v10 is above v9)."
    checks = [
        prints("cat current/about.txt", f"release {max(numbers)}"),
        prints("test -L current && echo link", "link"),
    ]
    return Task(
        text=text, files=files, checks=checks, solution="ln -s releases/$(ls releases | sort -V | tail -1) current"
    )


def pack_folder(random: Random) -> Task:
    names = sorted(words(random, 4))
    files = {f"project/{name}.txt": f"{name} {random.randint(1, 99)}\n" for name in names}
    text = "Pack the folder project into project.tar.gz, a gzipped tar archive, and leave the folder where it is."
    content = "".join(str(files[f"project/{name}.txt"]) for name in names).strip()
    unpack = "d=$(mktemp -d) && tar xzf project.tar.gz -C $d && cat $d/project/*.txt"
    checks = [prints(unpack, content), prints("cat project/*.txt", content)]
    return Task(text=text, files=files, checks=checks, solution="tar czf project.tar.gz project")


def unpack_archive(random: Random) -> Task:
    name, secret = words(random, 2)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        data = f"the word is {secret}\n".encode()
        entry = tarfile.TarInfo(f"{name}/deep/word.txt")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    text = "Somewhere in parcel.tar.gz is a file word.txt. Write the last word of its line into answer.txt."
    solution = f"tar xzf parcel.tar.gz; awk '{{print $NF}}' {name}/deep/word.txt > answer.txt"
    return Task(text=text, files={"parcel.tar.gz": packed.getvalue()}, checks=[answer(secret)], solution=solution)


def total_size(random: Random) -> Task:
    sizes = {name: random.randint(1, 500) for name in words(random, 6)}
    files = {f"store/{name}/{name}": "y" * size for name, size in sizes.items()}
    text = "How many bytes do all regular files below store/ hold together? Write the number into answer.txt."
    return Task(
        text=text,
        files=files,
        checks=[answer(sum(sizes.values()))],
        solution="find store -type f -exec cat {} + | wc -c > answer.txt",
    )


FINDING: Mapping[str, Callable[[Random], Task]] = {
    task.__name__: task
    for task in (
        find_word, find_largest, count_files, rename_extension, delete_temporary, sort_into_folders, same_content,
        make_executable, link_release, pack_folder, unpack_archive, total_size,
    )
}  # fmt: skip
