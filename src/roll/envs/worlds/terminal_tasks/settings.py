"""Tasks about configurations: change one setting, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random

from roll.envs.worlds.terminal_tasks.task import Task, draw_words, expect_file, expect_output

__all__ = ["SETTINGS_TASKS"]


def _make_edit_task(text: str, path: str, before: str, old: str, new: str) -> Task:
    """Return a task to replace one line of a file and change nothing else."""
    after = before.replace(old, new)
    script = f"sed -i 's|^{old}$|{new}|' {path}"
    return Task(text=text, files={path: before}, checks=[expect_file(path, after.strip())], solution=script)


def _make_server_port_task(random: Random) -> Task:
    old, new = random.sample(range(2000, 9000), 2)
    before = f"[client]\nport = {old - 1}\n\n[server]\nhost = localhost\nport = {old}\n"
    text = f"In server.ini, change the port of the section [server] to {new}, and nothing else."
    return _make_edit_task(text, "server.ini", before, f"port = {old}", f"port = {new}")


def _make_json_setting_task(random: Random) -> Task:
    section, key, other = draw_words(random, 3)
    data = {section: {key: random.randint(1, 9), other: True}, "version": 3}
    new = random.randint(10, 99)
    text = f"In settings.json, set {key} in {section} to the number {new}; all else stays as it is."
    expected = {**data, section: {key: new, other: True}}
    script = (
        'import json; d = json.load(open("settings.json")); '
        f'd["{section}"]["{key}"] = {new}; json.dump(d, open("settings.json", "w"))'
    )
    show = "python3 -c 'import json; print(json.dumps(json.load(open(\"settings.json\")), sort_keys=True))'"
    checks = [expect_output(show, json.dumps(expected, sort_keys=True))]
    return Task(
        text=text, files={"settings.json": json.dumps(data, indent=2)}, checks=checks, solution=f"python3 -c '{script}'"
    )


def _make_environment_variable_task(random: Random) -> Task:
    name, value, other = draw_words(random, 3)
    before = f"HOST=localhost\nOTHER={other}"  # no line break at the end, which is easy to overlook
    text = f"Add a line that sets {name.upper()} to {value} at the end of the file app.env; the other lines stay."
    line = f"{name.upper()}={value}"
    checks = [expect_output(f". ./app.env; echo $HOST $OTHER ${name.upper()}", f"localhost {other} {value}")]
    return Task(text=text, files={"app.env": before}, checks=checks, solution=f"printf '\\n{line}\\n' >> app.env")


def _make_switch_off_task(random: Random) -> Task:
    names = draw_words(random, 5)
    chosen = random.choice(names)
    before = "".join(f"load {name}\n" for name in names)
    text = f"In modules.conf, comment out the line that loads {chosen}: put '# ' before it."
    return _make_edit_task(text, "modules.conf", before, f"load {chosen}", f"# load {chosen}")


def _make_hosts_entry_task(random: Random) -> Task:
    others = draw_words(random, 3)
    address = f"192.168.{random.randint(0, 9)}.{random.randint(2, 250)}"
    before = "127.0.0.1 localhost\n" + "".join(f"192.168.100.{n} {other}\n" for n, other in enumerate(others, start=2))
    text = f"In the file hosts, {others[0]} has a wrong address: it should be {address}."
    return _make_edit_task(text, "hosts", before, f"192.168.100.2 {others[0]}", f"{address} {others[0]}")


def _make_log_level_task(random: Random) -> Task:
    old, new = random.sample(["debug", "info", "warning", "error"], 2)
    before = f"logging:\n  file: app.log\n  level: {old}\nworker:\n  level: {random.randint(1, 9)}\n"
    text = f"In app.yaml, set the level of logging to {new}, and nothing else."
    return _make_edit_task(text, "app.yaml", before, f"  level: {old}", f"  level: {new}")


def _make_schedule_task(random: Random) -> Task:
    hour, new, minute = *random.sample(range(0, 24), 2), random.randint(0, 59)
    before = f"{minute} {hour} * * * backup\n15 * * * * report\n"
    after = before.replace(f"{minute} {hour} * * * backup", f"{minute} {new} * * * backup")
    text = f"The file crontab runs backup at {hour}:{minute:02d} every day. Have it run at {new}:{minute:02d} instead."
    solution = f"sed -i 's/^{minute} {hour} /{minute} {new} /' crontab"
    return Task(text=text, files={"crontab": before}, checks=[expect_file("crontab", after.strip())], solution=solution)


SETTINGS_TASKS: Mapping[str, Callable[[Random], Task]] = {
    "server_port": _make_server_port_task,
    "json_setting": _make_json_setting_task,
    "environment_variable": _make_environment_variable_task,
    "switch_off": _make_switch_off_task,
    "hosts_entry": _make_hosts_entry_task,
    "log_level": _make_log_level_task,
    "schedule": _make_schedule_task,
}
