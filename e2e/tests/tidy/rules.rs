//! The rules. Each rule returns one line per complaint, and no line if the files keep the rule.

use std::collections::BTreeSet;

use crate::tree::{SourceFile, SourceTree};

/// The files that may use `proxy_wasm`; only the last may call the host.
const ADAPTER: &[&str] = &[
    "filter/src/lib.rs",
    "filter/src/root.rs",
    "filter/src/http.rs",
    "filter/src/host.rs",
    HOST,
];
const HOST: &str = "filter/src/host/abi.rs";
/// The file that wraps the adapter's contexts, in test builds only.
const WRAPPER: &str = "filter/src/drill/vm_time.rs";
/// The file that allocates raw memory.
const ALLOCATOR: &str = "filter/src/allocator.rs";
/// The module of the native picker that calls Envoy.
const NATIVE: &str = "filter-native/src/abi.rs";

/// The maximum number of lines of the adapter's files together, before tests: the adapter
/// translates and decides nothing.
const ADAPTER_LINES_MAX: usize = 900;

const GENERATED: [&str; 2] = ["crates/proto/src/gen/", "crates/discovery/src/etcd/gen/"];

/// Methods of the SDK's context traits that call the host. The methods panic if the host returns an
/// error, so the adapter implements the traits but must not call these methods.
const HOST_METHODS: &[&str] = &[
    "self.get_http_",
    "self.set_http_",
    "self.add_http_",
    "self.remove_http_",
    "self.resume_http_",
    "self.reset_http_",
    "self.send_http_response",
    "self.get_property",
    "self.set_property",
    "self.get_shared_data",
    "self.set_shared_data",
    "self.register_shared_queue",
    "self.resolve_shared_queue",
    "self.dequeue_shared_queue",
    "self.enqueue_shared_queue",
    "self.dispatch_",
    "self.open_grpc_stream",
    "self.send_grpc_",
    "self.cancel_grpc_",
    "self.close_grpc_",
    "self.get_grpc_",
    "self.get_current_time",
    "self.get_vm_configuration",
    "self.get_plugin_configuration",
    "self.set_tick_period",
    "self.call_foreign_function",
    "self.done()",
];

/// The maximum number of direct dependencies of the crates that are linked into a proxy: each
/// dependency is code on the request path.
const DEPENDENCIES_MAX: &[(&str, usize)] = &[
    ("crates/scheduler/Cargo.toml", 3),
    ("crates/pool-state/Cargo.toml", 3),
    ("crates/exchange/Cargo.toml", 5),
    ("filter/Cargo.toml", 8),
];

/// Crates that need an operating system, and `learning`, which only the daemon runs.
const DAEMON_CRATES: &[&str] = &[
    "learning",
    "tokio",
    "tonic",
    "hyper",
    "axum",
    "reqwest",
    "rustls",
    "ring",
    "kube",
    "rand",
    "getrandom",
];

// === the filter ===

pub(crate) fn hostcalls_stay_in_host(tree: &SourceTree) -> Vec<String> {
    complain(
        tree.under("filter/src/", ".rs")
            .filter(|file| file.path != HOST),
        |file, line| {
            if line.contains("proxy_wasm")
                && file.path != WRAPPER
                && !ADAPTER.contains(&file.path.as_str())
            {
                return Some("only the adapter imports proxy_wasm");
            }
            let calls = line.contains("hostcalls")
                || line.contains("extern \"C\"")
                || line.contains("wasm_import_module");
            (calls || HOST_METHODS.iter().any(|method| line.contains(method)))
                .then_some("only filter/src/host/abi.rs calls the host")
        },
    )
}

/// A request header that the picker sets, so that its length is not a client's choice.
const OWN_HEADER: &str = "X-GATEWAY-DESTINATION-ENDPOINT";

/// Checks that access logs cut values that clients write. A header or path may be as long as all
/// headers of a request together, which is 60 KiB in each line of the log.
pub(crate) fn access_logs_cut_what_clients_write(tree: &SourceTree) -> Vec<String> {
    let files = tree
        .under("envoy-config/", ".yaml")
        .chain(tree.under("deploy/", ".yaml"));
    let is_cut = |operator: &str| {
        operator
            .rsplit_once("):")
            .is_some_and(|(_, bytes)| bytes.parse::<u16>().is_ok())
    };
    complain(files, |_, line| {
        let operators = ["%REQ(", "%PATH("]
            .into_iter()
            .flat_map(|begin| line.split(begin).skip(1))
            .filter_map(|rest| rest.split('%').next());
        operators
            .filter(|operator| !operator.starts_with(OWN_HEADER))
            .any(|operator| !is_cut(operator))
            .then_some("cut it, as in %REQ(X-REQUEST-ID):64%")
    })
}

/// Files that may borrow from a `RefCell`. Borrowing a cell twice traps, and a trap fails all
/// streams of a worker. So only these files, in which callbacks enter the module, borrow cells. The
/// code that they call gets references, and the compiler checks that no cell is borrowed twice.
const CELLS: &[&str] = &[
    "filter/src/lib.rs",
    "filter/src/resume.rs",
    "filter/src/root.rs",
    "filter/src/http.rs",
    "filter/src/http/filter_host.rs",
    "filter/src/http/http_stream.rs",
    "filter/src/vm.rs",
    "filter/src/vm/leading.rs",
    // These files only name the type.
    "filter/src/vm/replica.rs",
    "filter/src/vm/vm_slot.rs",
    // These files are tests and drills.
    "filter/src/drill.rs",
    "filter/src/drill/sharing_cost.rs",
    "filter/src/fake.rs",
];

pub(crate) fn cells_are_opened_where_callbacks_enter(tree: &SourceTree) -> Vec<String> {
    let below = |file: &&SourceFile| {
        !CELLS.contains(&file.path.as_str())
            && !file.path.ends_with("/tests.rs")
            && !file.path.contains("/tests/")
    };
    complain(tree.under("filter/src/", ".rs").filter(below), |_, line| {
        let opens = ["RefCell", ".borrow()", ".borrow_mut()", "RefMut"]
            .iter()
            .any(|word| line.contains(word));
        opens.then_some(
            "a cell is borrowed below the entry of a callback: take its contents by reference",
        )
    })
}

pub(crate) fn adapter_is_thin(tree: &SourceTree) -> Vec<String> {
    let lines: usize = tree
        .where_path(|path| ADAPTER.contains(&path))
        .map(|file| file.before_tests().count())
        .sum();
    Vec::from_iter(
        (lines > ADAPTER_LINES_MAX)
            .then(|| format!("{ADAPTER:?} have {lines} lines, at most {ADAPTER_LINES_MAX}")),
    )
}

pub(crate) fn unsafe_stays_in_host(tree: &SourceTree) -> Vec<String> {
    complain(
        tree.under("", ".rs")
            .filter(|file| ![HOST, ALLOCATOR, NATIVE].contains(&&*file.path)),
        |_, line| {
            ["allow(unsafe_code", "expect(unsafe_code"]
                .iter()
                .any(|lift| line.contains(lift))
                .then_some(
                    "only host/abi.rs and allocator.rs of filter/src, and abi.rs of filter-native/src, may lift the ban on unsafe code",
                )
        },
    )
}

// === all sources ===

pub(crate) fn allows_have_a_reason(tree: &SourceTree) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in tree.under("", ".rs").filter(|file| {
        GENERATED
            .iter()
            .all(|folder| !file.path.starts_with(folder))
    }) {
        let lines: Vec<&str> = file.text.lines().map(str::trim_start).collect();
        for (at, line) in lines.iter().enumerate() {
            let lifts = ["#[allow(", "#![allow(", "#[expect(", "#![expect("]
                .iter()
                .any(|start| line.starts_with(start));
            let end = at
                + lines[at..]
                    .iter()
                    .position(|line| line.contains(")]"))
                    .unwrap_or(0);
            let beside = lines[at..=end]
                .iter()
                .any(|line| line.contains("reason =") || line.contains("//"));
            let above = at > 0 && lines[at - 1].starts_with("//");
            if lifts && !beside && !above {
                complaints.push(format!(
                    "{}:{}: a lint is lifted without its reason beside it",
                    file.path,
                    at + 1
                ));
            }
        }
    }
    complaints
}

pub(crate) fn tests_are_never_ignored(tree: &SourceTree) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in tree.under("", ".rs") {
        let ignored = file
            .lines()
            .filter(|(_, line)| line.trim_start().starts_with("#[ignore"));
        complaints.extend(
            ignored.map(|(number, _)| {
                format!("{}:{number}: an ignored test proves nothing", file.path)
            }),
        );
    }
    complaints
}

pub(crate) fn modules_have_names(tree: &SourceTree) -> Vec<String> {
    tree.under("", "/mod.rs")
        .map(|file| format!("{}: name the file foo.rs beside the folder foo/", file.path))
        .collect()
}

pub(crate) fn nothing_is_of_one_machine(tree: &SourceTree) -> Vec<String> {
    // Each path is written in two parts, so that this file does not contain the paths that it
    // forbids. The last path is the path of this checkout.
    let places = [
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/Us", "ers/"),
        env!("CARGO_MANIFEST_DIR"),
    ];
    let registries = [
        concat!("pypi", ".org"),
        concat!("python", "hosted.org"),
        concat!("crates", ".io/"),
        concat!("proxy.", "golang.org"),
    ];
    let mut complaints = Vec::new();
    for file in &tree.0 {
        for (number, line) in file.lines() {
            for needle in places
                .iter()
                .chain(&registries)
                .filter(|needle| line.contains(*needle))
            {
                complaints.push(format!(
                    "{}:{number}: {needle} is a path of one machine or the name of a registry",
                    file.path
                ));
            }
        }
    }
    complaints
}

// === manifests ===

pub(crate) fn scheduler_is_pure(tree: &SourceTree) -> Vec<String> {
    let named = dependencies(tree.text("crates/scheduler/Cargo.toml"));
    let formats = named
        .iter()
        .filter(|name| ["serde", "serde_json", "prost"].contains(&name.as_str()));
    formats
        .map(|name| format!("crates/scheduler/Cargo.toml: {name} (its types know no format)"))
        .collect()
}

pub(crate) fn direct_dependencies_are_few(tree: &SourceTree) -> Vec<String> {
    let counted = DEPENDENCIES_MAX
        .iter()
        .map(|(path, most)| (path, most, dependencies(tree.text(path)).len()));
    let over = counted.filter(|(_, most, count)| count > most);
    over.map(|(path, most, count)| format!("{path}: {count} direct dependencies, at most {most}"))
        .collect()
}

pub(crate) fn members_take_the_lints(tree: &SourceTree) -> Vec<String> {
    let bare = members(tree).filter(|file| !file.text.contains("[lints]\nworkspace = true"));
    bare.map(|file| format!("{}: does not take the workspace's lints", file.path))
        .collect()
}

/// Checks that each member takes the address of the repository from the workspace, so that the
/// address is set in one place. Fuzz crates are not members, and are not published.
pub(crate) fn members_take_the_repository(tree: &SourceTree) -> Vec<String> {
    let bare = members(tree).filter(|file| !file.text.contains("\nrepository.workspace = true\n"));
    bare.map(|file| format!("{}: lacks repository.workspace = true", file.path))
        .collect()
}

pub(crate) fn fuzz_crates_stand_alone(tree: &SourceTree) -> Vec<String> {
    let joined = tree
        .under("", "/fuzz/Cargo.toml")
        .filter(|file| !file.text.contains("[workspace]"));
    joined.map(|file| format!("{}: a fuzz crate needs nightly and must not be a workspace member: add [workspace]", file.path)).collect()
}

/// Checks that each pure crate repeats the bans of the root's `clippy.toml`. Clippy reads one
/// `clippy.toml` per crate and does not merge it with the root's.
pub(crate) fn pure_crates_repeat_the_bans(tree: &SourceTree) -> Vec<String> {
    let bans = |text: &str| -> BTreeSet<String> {
        text.split("path = \"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next().map(str::to_owned))
            .collect()
    };
    let root = bans(tree.text("clippy.toml"));
    let mut complaints = Vec::new();
    for file in tree.where_path(|path| path.ends_with("/clippy.toml")) {
        let missing = root
            .difference(&bans(&file.text))
            .cloned()
            .collect::<Vec<_>>();
        complaints.extend(
            missing
                .iter()
                .map(|path| format!("{}: does not repeat the ban on {path}", file.path)),
        );
    }
    complaints
}

pub(crate) fn daemon_crates(cargo_tree: &str) -> Vec<String> {
    let names = cargo_tree.lines().filter_map(|line| line.split(' ').next());
    let found = names.filter(|name| DAEMON_CRATES.contains(name));
    found
        .map(|name| format!("switchpoint.wasm is built from {name}"))
        .collect()
}

// === what users read and mount ===

pub(crate) fn envoy_is_configured_in_one_place(tree: &SourceTree) -> Vec<String> {
    let elsewhere = tree.where_path(|path| !path.starts_with("envoy-config/"));
    complain(elsewhere, |_, line| {
        line.starts_with("static_resources:")
            .then_some("an Envoy config outside envoy-config/: the tests run the shipped files")
    })
}

/// Checks the verbs (`make test`) that documents show in backquotes or at the start of a line of a
/// code block.
pub(crate) fn documented_verbs_exist(tree: &SourceTree) -> Vec<String> {
    let verbs = BTreeSet::from_iter(
        tree.text("Makefile")
            .lines()
            .filter_map(|line| line.split(':').next()),
    );
    let mut complaints = Vec::new();
    for file in tree.under("", ".md") {
        let mut in_block = false;
        for line in file.text.lines() {
            in_block ^= line.starts_with("```");
            let typed = line.strip_prefix("make ").filter(|_| in_block).into_iter();
            let shown = typed.chain(line.split("`make ").skip(1));
            for verb in shown
                .filter_map(|rest| rest.split([' ', '`']).next())
                .filter(|verb| !verbs.contains(verb))
            {
                complaints.push(format!(
                    "{}: `make {verb}` is not a target of the Makefile",
                    file.path
                ));
            }
        }
    }
    complaints
}

/// Checks the daemon's flags in the documents. A flag must be a field of the daemon's arguments
/// (clap derives the flag from it) or a string literal in its sources.
pub(crate) fn documented_flags_exist(tree: &SourceTree) -> Vec<String> {
    let source: String = tree
        .under("control-plane/src/", ".rs")
        .map(|file| file.text.as_str())
        .collect();
    let mut complaints = Vec::new();
    for file in tree.under("", ".md") {
        let lines = file
            .text
            .lines()
            .filter_map(|line| line.split_once("switchpointd "));
        for flag in lines.flat_map(|(_, rest)| after(rest, "--").collect::<Vec<_>>()) {
            let field = flag.replace('-', "_");
            if !source.contains(&format!("{field}:"))
                && !source.contains(&format!("\"{flag}\""))
                && flag != "help"
            {
                complaints.push(format!("{}: switchpointd has no --{flag}", file.path));
            }
        }
    }
    complaints
}

pub(crate) fn documented_ports_exist(tree: &SourceTree) -> Vec<String> {
    let config = tree.text("envoy-config/standalone.yaml");
    let rows = tree
        .text("docs/how-to/envoy.md")
        .lines()
        .filter(|line| line.contains("| Envoy |"));
    let ports = rows
        .filter_map(|line| line.trim_start_matches('|').split('|').next())
        .map(str::trim);
    let missing = ports.filter(|port| !config.contains(&format!("port_value: {port}")));
    missing
        .map(|port| format!("docs/how-to/envoy.md: port {port} is not in standalone.yaml"))
        .collect()
}

/// Checks the test modules in the column `module` of the page of failure drills.
pub(crate) fn documented_drills_exist(tree: &SourceTree) -> Vec<String> {
    let page = tree.text("docs/reference/failure-drills.md");
    let cells = page
        .lines()
        .filter(|line| line.starts_with("| "))
        .filter_map(|line| line.split(" | ").nth(1));
    let modules = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let exists = |module: &str| {
        let mut places = ["it", "long"]
            .into_iter()
            .map(|folder| tree.text(&format!("e2e/tests/{folder}/{module}.rs")));
        places.any(|text| text.contains("async fn "))
    };
    let missing = modules.filter(|module| !exists(module));
    missing
        .map(|module| {
            format!(
                "docs/reference/failure-drills.md: there is no test module {module} with a test"
            )
        })
        .collect()
}

/// A recipe of `CONTRIBUTING.md`, with code that follows it.
struct RecipeExample {
    /// The start of the recipe's first line.
    title: &'static str,
    /// The name that replaces `NAME` in the recipe's paths.
    name: &'static str,
    /// The marks of the new case. Each file that the case touches contains at least one of them.
    marks: &'static [&'static str],
    /// Files with a mark that a new case need not touch: they use this one case, by choice.
    others: &'static [&'static str],
}

const RECIPES: [RecipeExample; 7] = [
    RecipeExample {
        title: "**A scorer**",
        name: "context_length_aware",
        marks: &["context_length_aware", "\"context-length-aware\""],
        others: &[],
    },
    // This scorer has required parameters.
    RecipeExample {
        title: "**A scorer**",
        name: "header_label_affinity",
        marks: &["header_label_affinity", "\"header-label-affinity-scorer\""],
        others: &[],
    },
    RecipeExample {
        title: "**State that a plugin reads**",
        name: "",
        marks: &["evicted_share"],
        others: &[
            // A plugin that reads the state, with its tests.
            "crates/scheduler/src/scorer/marginal_cost.rs",
            "crates/scheduler/src/scorer/marginal_cost/cost.rs",
            "crates/scheduler/src/scorer/marginal_cost/cost/tests.rs",
            "crates/scheduler/tests/it/oracle.rs",
            // A record that need not have all state.
            "control-plane/tests/it/daemon/console.rs",
        ],
    },
    RecipeExample {
        title: "**An engine's metric**",
        name: "",
        // The last mark is the field in a pattern of all fields.
        marks: &[
            "KV_BLOCK_TOKENS",
            "\"kv_block_tokens\"",
            " kv_block_tokens,",
        ],
        // Random values are the sizes of real blocks.
        others: &["crates/scheduler/tests/it/pools.rs"],
    },
    RecipeExample {
        title: "**An engine**",
        name: "",
        marks: &["\"trtllm-serve\"", "trtllm_num_requests_waiting"],
        others: &[
            // Tests of labels and URLs, each with two or three engines.
            "control-plane/src/scrape/engine/tests.rs",
            "control-plane/tests/it/scrape.rs",
        ],
    },
    RecipeExample {
        title: "**A discovery backend**",
        name: "directory",
        marks: &["DirectoryBackend", "DirectorySource"],
        others: &[
            // The command that writes into the directory, and users of the library.
            "control-plane/src/cli/register.rs",
            "crates/discovery/examples/frontend.rs",
            "crates/discovery/tests/it/documented.rs",
        ],
    },
    RecipeExample {
        title: "**A request API**",
        name: "",
        marks: &["Conversations", "\"/v1/conversations\""],
        // A test with some paths.
        others: &["e2e/tests/it/rewrite.rs"],
    },
];

/// Checks that a recipe lists every Rust file that its example is in, also files of tests, tools,
/// benches and fuzz targets, so that a reader who follows the recipe is done.
pub(crate) fn recipes_list_every_file(tree: &SourceTree) -> Vec<String> {
    let guide = tree.text("CONTRIBUTING.md");
    let mut complaints = Vec::new();
    for example in RECIPES {
        let title = example.title;
        let recipe = guide.find(title).map_or("", |start| &guide[start..]);
        let steps: String = recipe.lines().take_while(|line| !line.is_empty()).collect();
        let listed = steps.replace("NAME", example.name);
        let has_mark = |file: &&SourceFile| {
            file.lines()
                .filter(|(_, line)| !line.trim_start().starts_with("//"))
                .any(|(_, line)| example.marks.iter().any(|mark| line.contains(mark)))
        };
        let files = BTreeSet::from_iter(
            tree.under("", ".rs")
                .filter(has_mark)
                .map(|file| file.path.as_str()),
        );
        let is_listed = |path: &str| listed.contains(&format!("`{path}`"));
        if !files.iter().any(|path| is_listed(path)) {
            complaints.push(format!(
                "CONTRIBUTING.md: no code follows the recipe {title}"
            ));
        }
        for path in &files {
            if !is_listed(path) && !example.others.contains(path) {
                complaints.push(format!("CONTRIBUTING.md: the recipe {title} lacks {path}"));
            }
        }
        for path in example.others {
            if is_listed(path) || !files.contains(path) {
                complaints.push(format!(
                    "{path} is in `others` of the recipe {title}, without a reason"
                ));
            }
        }
    }
    complaints
}

/// Checks that the files in code spans are paths from the root. `.ci/house.py check` looks whether
/// such paths exist, and no other paths.
pub(crate) fn guide_names_files_from_the_root(tree: &SourceTree) -> Vec<String> {
    let is_from_root = |file: &str| {
        let first = file.split('/').next();
        tree.0
            .iter()
            .any(|other| other.path.split('/').next() == first)
    };
    files_in_code_spans(tree.text("CONTRIBUTING.md"))
        .filter(|file| !is_from_root(file))
        .map(|file| format!("CONTRIBUTING.md: `{file}` is no path from the root"))
        .collect()
}

/// Checks the numbers in the first sentence of a recipe. The first number counts the files in steps
/// without a condition. If steps have a condition, the second number counts all files.
pub(crate) fn recipes_count_their_files(tree: &SourceTree) -> Vec<String> {
    let mut complaints = Vec::new();
    let guide = tree.text("CONTRIBUTING.md");
    for recipe in guide.split("\n\n").filter(|text| text.starts_with("**")) {
        let Some((head, steps)) = recipe.split_once("\n1. ") else {
            continue;
        };
        let head = head.replace('\n', " ");
        let sentence = head.split(". ").next().unwrap_or_default();
        let Some((title, counts)) = sentence.split_once(" changes ") else {
            continue;
        };
        let stated: Vec<usize> = counts
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|number| number.parse().ok())
            .collect();
        let mut always = BTreeSet::new();
        let mut all = BTreeSet::new();
        for step in numbered_steps(steps) {
            let has_condition = step
                .split(|c: char| !c.is_alphabetic())
                .any(|word| ["if", "If", "unless"].contains(&word));
            for file in files_in_code_spans(&step) {
                if !has_condition {
                    always.insert(file.to_owned());
                }
                all.insert(file.to_owned());
            }
        }
        let mut listed = vec![always.len(), all.len()];
        listed.dedup();
        if stated != listed {
            complaints.push(format!(
                "CONTRIBUTING.md: the recipe {title} states {stated:?} files and lists {listed:?}"
            ));
        }
    }
    complaints
}

// === helpers ===

/// Returns the steps of a numbered list, each in one line. `list` begins after the first number.
fn numbered_steps(list: &str) -> Vec<String> {
    let mut steps = vec![String::new()];
    for line in list.lines() {
        let is_next = line
            .split_once(". ")
            .is_some_and(|(number, _)| number.parse::<u32>().is_ok());
        if is_next {
            steps.push(String::new());
        }
        if let Some(step) = steps.last_mut() {
            step.push_str(line);
            step.push(' ');
        }
    }
    steps
}

/// Returns the code spans of a text that name a file or a folder.
fn files_in_code_spans(text: &str) -> impl Iterator<Item = &str> {
    let spans = text.split('`').skip(1).step_by(2);
    spans.filter(|span| {
        let ends = [".rs", ".toml", ".yaml", ".json", "/"];
        !span.contains(' ') && ends.iter().any(|end| span.ends_with(end))
    })
}

/// Returns one complaint for each line of code that `judge` objects to.
fn complain<'a>(
    files: impl Iterator<Item = &'a SourceFile>,
    judge: impl Fn(&SourceFile, &str) -> Option<&'static str>,
) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files {
        for (number, line) in file.code() {
            complaints.extend(
                judge(file, line)
                    .map(|why| format!("{}:{number}: {why}: {}", file.path, line.trim())),
            );
        }
    }
    complaints
}

/// Returns the manifests of the workspace's members.
fn members(tree: &SourceTree) -> impl Iterator<Item = &SourceFile> {
    tree.under("", "/Cargo.toml")
        .filter(|file| !file.text.contains("[workspace]"))
}

/// Returns the names under `[dependencies]` in a manifest.
fn dependencies(manifest: &str) -> Vec<String> {
    let section = manifest
        .lines()
        .skip_while(|line| line.trim() != "[dependencies]")
        .skip(1);
    let lines = section.take_while(|line| !line.starts_with('['));
    let names = lines
        .filter_map(|line| line.split(['.', '=', ' ']).next())
        .map(str::trim);
    names
        .filter(|name| !name.is_empty() && !name.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

/// Returns the word (letters, digits, dashes, underscores) after each occurrence of `marker` that
/// is at the start of a word.
fn after<'a>(text: &'a str, marker: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(marker).filter_map(move |(at, _)| {
        let starts_word = text[..at]
            .chars()
            .next_back()
            .is_none_or(|before| !before.is_alphanumeric() && before != '-');
        let rest = &text[at + marker.len()..];
        let word = rest
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_')
            .next()
            .unwrap_or_default();
        (starts_word && !word.is_empty()).then_some(word)
    })
}
