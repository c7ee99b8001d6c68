"""Tasks about text and data: filter, count, join, convert."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from roll.envs.worlds.terminal_tasks.task import Task, draw_words, expect_answer, expect_file

__all__ = ["TEXT_TASKS"]


def _make_sum_column_task(random: Random) -> Task:
    rows = [(name, random.randint(1, 50), random.randint(1, 900)) for name in draw_words(random, 10)]
    table = "name,count,price\n" + "".join(f"{n},{c},{p}\n" for n, c, p in rows)
    text = "Write the sum of the column price of sales.csv into answer.txt."
    solution = "awk -F, 'NR>1{s+=$3}END{print s}' sales.csv > answer.txt"
    return Task(
        text=text, files={"sales.csv": table}, checks=[expect_answer(sum(r[2] for r in rows))], solution=solution
    )


def _make_keep_errors_task(random: Random) -> Task:
    lines = [
        f"{random.choice(['INFO', 'WARN', 'ERROR'])} {name} {random.randint(1, 99)}" for name in draw_words(random, 20)
    ]
    lines.append("ERROR last 0")
    kept = "\n".join(line for line in lines if line.startswith("ERROR"))
    text = "Write the lines of app.log that begin with ERROR into errors.txt, in their order."
    files = {"app.log": "\n".join(lines) + "\n"}
    return Task(
        text=text, files=files, checks=[expect_file("errors.txt", kept)], solution="grep ^ERROR app.log > errors.txt"
    )


def _make_different_words_task(random: Random) -> Task:
    pool = draw_words(random, random.randint(5, 15))
    body = " ".join(random.choices(pool, k=60))
    text = "How many different words does story.txt have? Write the number into answer.txt."
    solution = "tr -s ' \\n' '\\n\\n' < story.txt | grep . | sort -u | wc -l > answer.txt"
    return Task(
        text=text, files={"story.txt": body + "\n"}, checks=[expect_answer(len(set(body.split())))], solution=solution
    )


def _make_busiest_address_task(random: Random) -> Task:
    addresses = [f"10.0.{random.randint(0, 9)}.{n}" for n in random.sample(range(1, 250), 6)]
    lines = [address for rank, address in enumerate(addresses) for _ in range(12 - 2 * rank)]
    random.shuffle(lines)
    log = "".join(f"{address} GET /{n}\n" for n, address in enumerate(lines))
    text = "Which address (first column) occurs most often in access.log? Write it into answer.txt."
    solution = "awk '{print $1}' access.log | sort | uniq -c | sort -rn | head -1 | awk '{print $2}' > answer.txt"
    return Task(text=text, files={"access.log": log}, checks=[expect_answer(addresses[0])], solution=solution)


def _make_sort_numbers_task(random: Random) -> Task:
    numbers = random.sample(range(-500, 2000), 15)
    text = "Write the numbers of numbers.txt into sorted.txt, one a line, the smallest first."
    files = {"numbers.txt": "".join(f"{n}\n" for n in numbers)}
    checks = [expect_file("sorted.txt", "\n".join(map(str, sorted(numbers))))]
    return Task(text=text, files=files, checks=checks, solution="sort -n numbers.txt > sorted.txt")


def _make_replace_everywhere_task(random: Random) -> Task:
    old, new, *names = draw_words(random, 6)
    before = {f"site/{name}.html": f"<p>{name} likes {old} and {old}s.</p>\n" for name in names}
    checks = [expect_file(path, content.replace(old, new).strip()) for path, content in before.items()]
    text = f"Replace {old} by {new} everywhere in the files of site/."
    return Task(text=text, files=before, checks=checks, solution=f"sed -i s/{old}/{new}/g site/*.html")


def _make_join_tables_task(random: Random) -> Task:
    names = draw_words(random, 6)
    ids = sorted(random.sample(range(100, 999), 6))
    ages = [random.randint(18, 80) for _ in names]
    shuffled = list(zip(ids, ages, strict=True))
    random.shuffle(shuffled)
    files = {
        "names.csv": "".join(f"{i},{n}\n" for i, n in zip(ids, names, strict=True)),
        "ages.csv": "".join(f"{i},{a}\n" for i, a in shuffled),
    }
    joined = "\n".join(f"{i},{n},{a}" for i, n, a in zip(ids, names, ages, strict=True))
    text = "names.csv has lines id,name; ages.csv has id,age. Write lines id,name,age into people.csv, by ascending id."
    solution = "join -t, <(sort names.csv) <(sort ages.csv) > people.csv"
    return Task(text=text, files=files, checks=[expect_file("people.csv", joined)], solution=solution)


def _make_drop_repetitions_task(random: Random) -> Task:
    lines = random.choices(draw_words(random, 7), k=20)
    text = "Write list.txt into unique.txt without repeated lines: each line where it occurs first."
    files = {"list.txt": "\n".join(lines) + "\n"}
    checks = [expect_file("unique.txt", "\n".join(dict.fromkeys(lines)))]
    return Task(text=text, files=files, checks=checks, solution="awk '!seen[$0]++' list.txt > unique.txt")


def _make_json_value_task(random: Random) -> Task:
    outer, inner, *names = draw_words(random, 5)
    value = random.randint(1000, 9999)
    data = {outer: {"items": [{"name": name, "code": value + n} for n, name in enumerate(names)]}, inner: 1}
    wanted = random.randrange(len(names))
    text = f"In data.json, which code has the item named {names[wanted]}? Write it into answer.txt."
    script = (
        f'import json; items = json.load(open("data.json"))["{outer}"]["items"]; '
        f'print(next(i["code"] for i in items if i["name"] == "{names[wanted]}"))'
    )
    solution = f"python3 -c '{script}' > answer.txt"
    return Task(
        text=text, files={"data.json": json.dumps(data)}, checks=[expect_answer(value + wanted)], solution=solution
    )


def _make_json_to_csv_task(random: Random) -> Task:
    rows = [{"name": name, "points": random.randint(0, 100)} for name in draw_words(random, 5)]
    text = "Turn scores.json into scores.csv: a first line name,points and a line for each entry, in their order."
    expected = "name,points\n" + "\n".join(f"{row['name']},{row['points']}" for row in rows)
    script = (
        'import json; print("name,points"); '
        '[print(r["name"], r["points"], sep=",") for r in json.load(open("scores.json"))]'
    )
    solution = f"python3 -c '{script}' > scores.csv"
    return Task(
        text=text,
        files={"scores.json": json.dumps(rows)},
        checks=[expect_file("scores.csv", expected)],
        solution=solution,
    )


def _make_days_between_task(random: Random) -> Task:
    days = [f"2024-{random.randint(1, 12):02d}-{random.randint(1, 28):02d}" for _ in range(30)]
    first, last = "2024-03-01", f"2024-{random.randint(6, 11):02d}-15"
    count = sum(first <= day <= last for day in days)
    text = f"visits.txt has a day a line. How many are from {first} to {last}, both included? Write it into answer.txt."
    solution = f'awk \'$0 >= "{first}" && $0 <= "{last}"\' visits.txt | wc -l > answer.txt'
    return Task(
        text=text, files={"visits.txt": "\n".join(days) + "\n"}, checks=[expect_answer(count)], solution=solution
    )


def _make_most_frequent_letter_task(random: Random) -> Task:
    letters = random.sample("abcdefghij", 5)
    body = [letter for rank, letter in enumerate(letters) for _ in range(9 - rank)]
    random.shuffle(body)
    text = "Which letter is most frequent in letters.txt? Write it into answer.txt."
    expected = Counter(body).most_common(1)[0][0]
    solution = "fold -w1 letters.txt | sort | uniq -c | sort -rn | head -1 | awk '{print $2}' > answer.txt"
    return Task(text=text, files={"letters.txt": "".join(body)}, checks=[expect_answer(expected)], solution=solution)


TEXT_TASKS: Mapping[str, Callable[[Random], Task]] = {
    "sum_column": _make_sum_column_task,
    "keep_errors": _make_keep_errors_task,
    "different_words": _make_different_words_task,
    "busiest_address": _make_busiest_address_task,
    "sort_numbers": _make_sort_numbers_task,
    "replace_everywhere": _make_replace_everywhere_task,
    "join_tables": _make_join_tables_task,
    "drop_repetitions": _make_drop_repetitions_task,
    "json_value": _make_json_value_task,
    "json_to_csv": _make_json_to_csv_task,
    "days_between": _make_days_between_task,
    "most_frequent_letter": _make_most_frequent_letter_task,
}
