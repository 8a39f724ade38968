"""Tests of the counters in `.ci/house.py`. Standard library only."""

import pathlib
import tempfile
import unittest

import house
import links


class FakeTree(house.Tree):
    """Files in memory."""

    def __init__(self, **texts: str):
        self.revision, self.texts = "fake", {name.replace("__", "/") + ".rs": text for name, text in texts.items()}
        self.names = list(self.texts)

    def size(self, name: str) -> int:
        return len(self.texts[name])


def tree_of(files: dict[str, str]) -> FakeTree:
    tree = FakeTree()
    tree.texts, tree.names = files, list(files)
    return tree


class Cycles(unittest.TestCase):
    def cycles(self, **texts: str) -> list[list[str]]:
        return house.components(house.import_edges(FakeTree(**texts), "c"))

    def test_two_files_that_import_each_other_are_a_cycle(self):
        found = self.cycles(c__src__lib="mod a; mod b;", c__src__a="use crate::b::B; struct A;", c__src__b="struct B(crate::a::A);")
        self.assertEqual(found, [["c/src/a.rs", "c/src/b.rs"]])

    def test_a_name_counts_for_the_file_that_defines_it(self):
        texts = {"c__src__lib": "mod a; mod b; pub use a::A; pub use b::B;", "c__src__a": "use crate::B; pub struct A;", "c__src__b": "pub struct B;"}
        self.assertEqual(self.cycles(**texts), [])
        self.assertEqual(len(self.cycles(**texts | {"c__src__b": "use crate::{A}; pub struct B;"})), 1)

    def test_tests_and_comments_are_no_imports(self):
        test = "struct B; // crate::a::A\n#[cfg(test)]\nmod tests {\n use crate::a::A; fn f() { if true {} }\n}\n"
        self.assertEqual(self.cycles(c__src__lib="mod a; mod b;", c__src__a="use crate::b::B; struct A;", c__src__b=test), [])

    def test_super_in_an_inline_module_is_the_file_itself(self):
        self.assertEqual(self.cycles(c__src__lib="mod a; use a::A;", c__src__a="struct A; mod wasm { use super::A; struct B(A); }"), [])

    def test_a_child_that_uses_its_parent_is_a_cycle_with_it(self):
        self.assertEqual(len(self.cycles(c__src__lib="mod a;", c__src__a="mod b; use b::B; struct A;", c__src__a__b="use super::A; struct B;")), 1)


class Counts(unittest.TestCase):
    def test_strings_and_lifetimes_do_not_confuse_the_reader(self):
        code, comments, strings = house.split('fn f<\'a>(x: &\'a str) { let c = \'"\'; g("// no {", r#"a " b"#) } // yes')
        self.assertEqual([text for _, text in comments], ["// yes"])
        self.assertEqual(strings, ['"// no {"', 'r#"a " b"#'])
        self.assertEqual(code.count("{"), code.count("}"))

    def test_types_defined_twice_are_found(self):
        names = house.type_names(FakeTree(a="pub struct Row;\nimpl T for Row { \n    type Row = u8; }", b="enum Row { A }"))
        self.assertEqual(len(names["Row"]), 2)

    def test_functions_are_measured(self):
        self.assertEqual(house.functions(FakeTree(a="fn f() {\n}\ntrait T { fn g(); }"), of_tests=False)[0], (2, "a.rs:1 f"))

    def test_vague_names_are_found(self):
        text = "fn of(x: u8) -> Self {}\nfn of(&self, x: u8) {}\nlet told = 1;\nlet mut is_gone = 1;\nfn the_one_that_is_gone() {}\n"
        self.assertEqual([place.split()[1] for place in house.vague_names(FakeTree(a=text))], ["told", "is_gone", "of"])
        text = "fn whole(&self) {}\nfn whole_page() {}\n#[cfg(test)]\nmod tests {\n fn said() {}\n}\n"
        self.assertEqual(house.vague_names(FakeTree(a=text, a__tests__it="fn asked() {}\n")), ["a.rs:1 whole"])

    def test_wide_structs_need_a_reason(self):
        fields = "\n".join(f"    f{at}: u8," for at in range(13))
        self.assertEqual(len(house.wide_structs(FakeTree(a="struct S {\n" + fields + "\n}"))), 1)
        self.assertEqual(house.wide_structs(FakeTree(a="/// One row: its fields are the columns. All 13 fields are read.\nstruct S {\n" + fields + "\n}")), [])

    def test_docstrings_need_a_subject_where_they_begin(self):
        counts, places = house.phrases(FakeTree(a="/// Its name.\nfn f() {}\n/// The name of a pool.\n/// It is unique.\nfn g() {}\n// It is late.\n"))
        self.assertEqual((sum(counts.values()), places), (1, ["a.rs:1: Its name."]))
        self.assertEqual(len(house.phrases(FakeTree(a="/// Has it state?\nfn f() {}\n//! What a pool has.\n"))[1]), 2)

    def test_phrases_are_found_in_comments_and_not_in_code(self):
        counts, _ = house.phrases(FakeTree(a="fn nobody() {} // nobody is told\n"))
        self.assertEqual(sum(counts.values()), 2)

    def test_long_pages_are_found(self):
        lines = "word\n" * house.HOW_TO_LINES_MAX
        tree = tree_of({"docs/how-to/a.md": lines, "docs/how-to/b.md": lines + "word\n", "docs/reference/c.md": lines * 2, "README.md": lines})
        self.assertEqual([place.split(":")[0] for place in house.long_pages(tree)], ["docs/how-to/b.md", "README.md"])

    def test_all_documents_share_one_limit_of_words(self):
        half = "word " * (house.DOCUMENT_WORDS_MAX // 2)
        self.assertEqual(house.excess_words(tree_of({"a.md": half, "b/c.md": half, "d.rs": half})), [])
        self.assertEqual(len(house.excess_words(tree_of({"a.md": half, "b/c.md": half + "word"}))), 1)
        self.assertEqual(house.words("```\nflow_control: 1\n```"), 2)

    def test_data_files_have_limits(self):
        results, traces = "x" * house.RESULT_BYTES_MAX, "x" * (house.DATA_BYTES_MAX - house.RESULT_BYTES_MAX)
        files = {"docs/data/a.json": results, "tools/b/data/c.gz": traces, "docs/d.svg": results}
        self.assertEqual(house.excess_data(tree_of(files)), [])
        self.assertEqual(len(house.excess_data(tree_of(files | {"tools/b/data/e/f.txt": "x"}))), 1)
        self.assertEqual(len(house.excess_data(tree_of(files | {"docs/data/g.json": "x"}))), 2)

    def test_subjects(self):
        self.assertTrue(house.NOT_IMPERATIVE.match("Added a test"))
        self.assertFalse(house.NOT_IMPERATIVE.match("Add a test"))


class Links(unittest.TestCase):
    def broken(self, text: str, name: str = "page.md") -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "there.md").write_text("# A `page`\n## One more: [it](x)\n")
            return links.broken(name, text, root)

    def test_links_that_lead_somewhere(self):
        self.assertEqual(self.broken("[a](there.md) [b](there.md#a-page) [c](there.md#one-more-it) [d](https://x/y) `[e](no.md)`"), [])

    def test_links_that_lead_nowhere(self):
        self.assertEqual(len(self.broken("[a](no.md)\n[b](there.md#nothing)")), 2)

    def test_links_that_leave_the_site(self):
        self.assertEqual(len(self.broken("[a](../there.md)\n", "docs/page.md")), 1)

    def test_code_blocks_are_not_read(self):
        self.assertEqual(self.broken("```\n[a](no.md)\n```\n"), [])


class Names(unittest.TestCase):
    def test_names_in_documents_exist(self):
        codes, paths = ["struct A;\nimpl A {\n    fn b() {}\n}", "enum C {\n    D,\n}"], ["c/src/a.rs", "c/src/a/b.rs"]
        known = "`A::b` `C::D` `c/src/a.rs` `c/src/a/b` `c/src/` `c/src/NAME.rs` `other/thing`\n```\n`A::x`\n```\n"
        self.assertEqual(house.unknown_names({"X.md": known}, codes, paths), [])
        unknown = "`A::x` `B::b` `c/src/x.rs`"
        self.assertEqual(house.unknown_names({"X.md": unknown}, codes, paths), ["X.md: `A::x`", "X.md: `B::b`", "X.md: `c/src/x.rs`"])


if __name__ == "__main__":
    unittest.main()
