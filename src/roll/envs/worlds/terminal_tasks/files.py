"""Tasks about files: find, count, move, pack."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from random import Random

from roll.envs.worlds.terminal_tasks.task import Task, draw_words, expect_answer, expect_output

__all__ = ["FILE_TASKS"]


def _make_find_word_task(random: Random) -> Task:
    secret, *names = draw_words(random, 9)
    hidden = random.choice(names)
    files = {
        f"notes/{name}/{name}.txt": f"about {name}\n" + (f"the {secret} is here\n" if name == hidden else "")
        for name in names
    }
    text = f"One file below notes/ mentions {secret}. Write its path, beginning with notes/, into answer.txt."
    return Task(
        text=text,
        files=files,
        checks=[expect_answer(f"notes/{hidden}/{hidden}.txt")],
        solution=f"grep -rl {secret} notes > answer.txt",
    )


def _make_find_largest_task(random: Random) -> Task:
    names = draw_words(random, 6)
    sizes = random.sample(range(10, 400), 6)
    files = {f"data/{name}.bin": "x" * size for name, size in zip(names, sizes, strict=True)}
    largest = names[sizes.index(max(sizes))]
    text = "Write the name (without folder) of the largest file in data/ into answer.txt."
    return Task(
        text=text, files=files, checks=[expect_answer(f"{largest}.bin")], solution="ls -S data | head -1 > answer.txt"
    )


def _make_count_files_task(random: Random) -> Task:
    names = draw_words(random, 12)
    count = random.randint(2, 9)
    files = {f"logs/{name}/{i % 3}/{name}.{'log' if i < count else 'txt'}": "line\n" for i, name in enumerate(names)}
    text = "How many files below logs/, at any depth, end in .log? Write the number into answer.txt."
    return Task(
        text=text, files=files, checks=[expect_answer(count)], solution="find logs -name '*.log' | wc -l > answer.txt"
    )


def _make_rename_extension_task(random: Random) -> Task:
    names = sorted(draw_words(random, random.randint(3, 6)))
    files = {f"docs/{name}.txt": f"{name}\n" for name in names}
    text = "Rename every .txt file in docs/ so that it ends in .md instead, with its content unchanged."
    listed = "\n".join(f"{name}.md" for name in names)
    checks = [expect_output("LC_ALL=C ls docs", listed), expect_output("cat docs/*.md", "\n".join(names))]
    return Task(text=text, files=files, checks=checks, solution='for f in docs/*.txt; do mv "$f" "${f%.txt}.md"; done')


def _make_delete_temporary_task(random: Random) -> Task:
    names = sorted(draw_words(random, 8))
    count = random.randint(2, 6)
    chosen = set(random.sample(names, count))
    files = {f"work/{name}.{'tmp' if name in chosen else 'dat'}": name for name in names}
    kept = "\n".join(f"{name}.dat" for name in names if name not in chosen)
    text = "Delete the files in work/ that end in .tmp, and no others."
    return Task(text=text, files=files, checks=[expect_output("LC_ALL=C ls work", kept)], solution="rm work/*.tmp")


def _make_sort_into_folders_task(random: Random) -> Task:
    names = draw_words(random, 8)
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
    checks = [expect_output("find sorted -type f | LC_ALL=C sort", expected), expect_output("find inbox -type f", "")]
    return Task(text=text, files=files, checks=checks, solution=solution)


def _make_same_content_task(random: Random) -> Task:
    names = draw_words(random, 8)
    one, two = sorted(random.sample(names, 2))
    files = {f"photos/{name}.raw": f"{random.random()}" for name in names}
    files[f"photos/{two}.raw"] = files[f"photos/{one}.raw"]
    text = "Two files in photos/ have the same content. Write their names, sorted, one a line, into answer.txt."
    solution = "cd photos; md5sum * | sort | uniq -w32 -D | awk '{print $2}' | LC_ALL=C sort > ../answer.txt"
    return Task(text=text, files=files, checks=[expect_answer(f"{one}.raw\n{two}.raw")], solution=solution)


def _make_make_executable_task(random: Random) -> Task:
    names = sorted(draw_words(random, 3))
    files = {f"bin/{name}.sh": f"#!/bin/bash\necho {name}\n" for name in names}
    text = "The scripts in bin/ cannot be run, as in bin/NAME.sh. Make all of them executable."
    checks = [expect_output(f"bin/{name}.sh", name) for name in names]
    return Task(text=text, files=files, checks=checks, solution="chmod +x bin/*.sh")


def _make_link_release_task(random: Random) -> Task:
    numbers = random.sample(range(1, 30), 4)
    files = {f"releases/v{n}/about.txt": f"release {n}\n" for n in numbers}
    text = "Make a symbolic link named current to the release in releases/ with the highest number (v10 is above v9)."
    checks = [
        expect_output("cat current/about.txt", f"release {max(numbers)}"),
        expect_output("test -L current && echo link", "link"),
    ]
    return Task(
        text=text, files=files, checks=checks, solution="ln -s releases/$(ls releases | sort -V | tail -1) current"
    )


def _make_pack_folder_task(random: Random) -> Task:
    names = sorted(draw_words(random, 4))
    files = {f"project/{name}.txt": f"{name} {random.randint(1, 99)}\n" for name in names}
    text = "Pack the folder project into project.tar.gz, a gzipped tar archive, and leave the folder where it is."
    content = "".join(str(files[f"project/{name}.txt"]) for name in names).strip()
    unpack = "d=$(mktemp -d) && tar xzf project.tar.gz -C $d && cat $d/project/*.txt"
    checks = [expect_output(unpack, content), expect_output("cat project/*.txt", content)]
    return Task(text=text, files=files, checks=checks, solution="tar czf project.tar.gz project")


def _make_unpack_archive_task(random: Random) -> Task:
    name, secret = draw_words(random, 2)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        data = f"the word is {secret}\n".encode()
        entry = tarfile.TarInfo(f"{name}/deep/word.txt")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    text = "Somewhere in parcel.tar.gz is a file word.txt. Write the last word of its line into answer.txt."
    solution = f"tar xzf parcel.tar.gz; awk '{{print $NF}}' {name}/deep/word.txt > answer.txt"
    return Task(
        text=text, files={"parcel.tar.gz": packed.getvalue()}, checks=[expect_answer(secret)], solution=solution
    )


def _make_total_size_task(random: Random) -> Task:
    sizes = {name: random.randint(1, 500) for name in draw_words(random, 6)}
    files = {f"store/{name}/{name}": "y" * size for name, size in sizes.items()}
    text = "How many bytes do all regular files below store/ hold together? Write the number into answer.txt."
    return Task(
        text=text,
        files=files,
        checks=[expect_answer(sum(sizes.values()))],
        solution="find store -type f -exec cat {} + | wc -c > answer.txt",
    )


FILE_TASKS: Mapping[str, Callable[[Random], Task]] = {
    "find_word": _make_find_word_task,
    "find_largest": _make_find_largest_task,
    "count_files": _make_count_files_task,
    "rename_extension": _make_rename_extension_task,
    "delete_temporary": _make_delete_temporary_task,
    "sort_into_folders": _make_sort_into_folders_task,
    "same_content": _make_same_content_task,
    "make_executable": _make_make_executable_task,
    "link_release": _make_link_release_task,
    "pack_folder": _make_pack_folder_task,
    "unpack_archive": _make_unpack_archive_task,
    "total_size": _make_total_size_task,
}
