"""Tests of `.ci/doc_commands.py`. Standard library only."""

import pathlib
import subprocess
import tempfile
import unittest
from unittest import mock

import doc_commands

PAGE = """# Install
## Own gateway

```yaml
# values.yaml: one pool
mode: gateway
```

```sh
make images   # all of them
CHART=x helm upgrade --install --wait --timeout 5m a deploy/charts/switchpoint -n switchpoint \\
  -f values.yaml && kubectl -n x get pods | head
```

## Other
```
not read
```
"""


class Pages(unittest.TestCase):
    def test_blocks_have_their_heading_and_line(self):
        found = doc_commands.blocks(PAGE)
        self.assertEqual([(b.language, b.heading) for b in found], [("yaml", "Own gateway"), ("sh", "Own gateway"), ("", "Other")])
        self.assertEqual(PAGE.splitlines()[found[1].line - 1], "make images   # all of them")
        self.assertEqual([doc_commands.file_name(b) for b in found], ["values.yaml", None, None])

    def test_commands_are_words_without_comments_variables_and_line_breaks(self):
        found = doc_commands.commands(doc_commands.blocks(PAGE)[1].text)
        self.assertEqual(found[0], ["make", "images"])
        self.assertEqual(found[1][:3], ["helm", "upgrade", "--install"])
        self.assertEqual(found[1][-2:], ["-f", "values.yaml"])
        self.assertEqual(found[2:], [["kubectl", "-n", "x", "get", "pods"], ["head"]])

    def test_an_installation_becomes_a_rendering(self):
        [(line, words, files)] = doc_commands.renderings("page.md", PAGE)
        self.assertEqual(words, ["template", "a", "deploy/charts/switchpoint", "-n", "switchpoint", "-f", "values.yaml"])
        self.assertEqual((line, list(files)), (10, ["values.yaml"]))

    def test_a_section_runs_in_a_folder_with_its_files(self):
        part = doc_commands.Section({"values.yaml": "a: b\n"}, "tail -f /dev/null &\nsleep 60\ngrep a values.yaml\nfalse\necho not reached\n")
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(doc_commands, "section", return_value=part):
            script = doc_commands.lay_out("page.md", "Own gateway", pathlib.Path(folder), pause_seconds_max=0)
            done = subprocess.run(["bash", script], text=True, capture_output=True, timeout=10, check=False)
        self.assertEqual((done.returncode, done.stdout), (1, "a: b\n"))

    def test_a_section_without_commands_is_a_mistake(self):
        with self.assertRaises(ValueError):
            doc_commands.lay_out("README.md", "Nothing", pathlib.Path("/nonexistent"))


class Complaints(unittest.TestCase):
    def wrong(self, command: str) -> list[str]:
        return doc_commands.complaints("page.md", f"```yaml\n# own.yaml\na: b\n```\n```sh\n{command}\n```\n")

    def test_commands_that_name_what_exists(self):
        for command in [
            "make demo", "make run ENDPOINTS=a:1", "kubectl apply -f envoy-config/kubernetes/rbac.yaml", "kubectl -n x logs y", "helm history a",
            "helm install a b -f own.yaml", "target/release/switchpointd check", "target/release/demo", "kubectl apply -f https://x/y.yaml",
        ]:
            self.assertEqual(self.wrong(command), [], command)

    def test_commands_that_name_what_does_not_exist(self):
        for command in [
            "make nothing", "kubectl apply -f envoy-config/none.yaml", "kubectl frobnicate", "helm instal a", "helm install a b -f none.yaml",
            "helm install a deploy/charts/none", "target/release/none", "echo 'open", "kubectl apply -f=deploy/charts/none",
        ]:
            self.assertEqual(len(self.wrong(command)), 1, command)


class Quotations(unittest.TestCase):
    TABLE = "| code | x |\n|---|---|\n| daemon: `cannot listen on … (--listen-…)`, `two` | `not this` |\n| `theirs is long` (Istio) | x |\n"

    def test_only_our_texts_of_the_first_column_are_quotations(self):
        self.assertEqual(doc_commands.quotations(self.TABLE), [(3, "cannot listen on"), (3, "(--listen-")])

    def test_a_text_that_no_source_prints_is_reported(self):
        self.assertEqual(doc_commands.misquoted(self.TABLE, 'format!("cannot listen on {address} (--listen-{what})")'), [])
        self.assertEqual(len(doc_commands.misquoted(self.TABLE, "")), 2)


if __name__ == "__main__":
    unittest.main()
