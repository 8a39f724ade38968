//! The command: reads the input, prints the values and the report, or writes them to a folder.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};

use super::chart::{self, ChartValues};
use super::defaults;
use super::items::GivenItems;
use super::objects::{self, FoundPickers};
use super::picker::{self, MigratedConfig};
use super::report::{self, PoolReport, ReportEntry};
use super::table::MigrationVerdict;
use crate::{LlmdPicker, printer, tree, values};
use control_plane::cli::build::VERSION;
use control_plane::config::yaml::YamlValue;
use discovery::kubernetes;

/// The largest input, in bytes. The objects of a namespace with a thousand pods are smaller.
pub const INPUT_BYTES_MAX: u64 = 4 << 20;

/// The maximum number of files. The limit prevents a mistaken shell pattern from reading a whole
/// disk.
const FILES_MAX: usize = 64;

/// The exit code if the input cannot be read.
const EXIT_UNREADABLE: u8 = 1;
/// The exit code if at least one item has no equivalent or is unknown.
const EXIT_LOSS: u8 = 3;

const HEAD: &str =
    "# Values of the Switchpoint chart, made from llm-d's by `switchpoint-migrate`.\n";

const EXAMPLES: &str = "\
Examples:
  The values with which llm-d's release `llama` was installed:
    helm get values llama -n prod > llama.values.yaml
    switchpoint-migrate -f llama.values.yaml --pool llama --namespace prod > values.yaml

  A running picker:
    kubectl get configmap,deployment,inferencepool,service -n prod -o yaml | switchpoint-migrate -
    switchpoint-migrate --cluster --namespace prod --pool llama --output-dir switchpoint/

  One configuration file:
    switchpoint-migrate picker.yaml

stdout has the values of our chart, with the configuration of each pool; stderr has the report:

    - `router.epp.replicas` = `3` -> `daemon.replicas`: two daemons: one leads, one stands by; ...
    - `router.tracing.enabled` = `true`: spans have settings of their own here: ...

docs/how-to/migrate.md has the steps of a migration, and what has no equivalent.
";

/// The resources of a namespace that describe endpoint pickers. A cluster may lack the kinds in the
/// second half of the list.
const RESOURCES: [&str; 6] = [
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/services",
    "/apis/apps/v1/namespaces/{}/deployments",
    "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools",
    "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives",
    "/apis/llm-d.ai/v1alpha2/namespaces/{}/inferenceobjectives",
];

/// Turns the values of llm-d's charts, or a running endpoint picker, into values of our chart.
///
/// Each item is kept, changed, or has no equivalent; the report has the reason. Nothing is
/// installed and no object is changed.
///
/// Exit code: 0 all kept or changed, 1 the input cannot be read, 2 an invalid command line, 3
/// something has no equivalent or is unknown.
#[derive(Debug, Parser)]
#[command(name = "switchpoint-migrate", version = VERSION, after_help = EXAMPLES)]
pub struct MigrateArgs {
    /// A file of values for llm-d's chart. Repeat the option in the same order as for helm. Needs
    /// --pool.
    #[arg(short = 'f', long = "values", value_name = "FILE", requires = "pool", conflicts_with_all = ["objects", "cluster"])]
    pub values: Vec<PathBuf>,

    /// Files with the Kubernetes objects of a running picker, or with one EndpointPickerConfig. `-`
    /// means stdin.
    #[arg(value_name = "OBJECTS", required_unless_present_any = ["values", "cluster"], conflicts_with = "cluster")]
    pub objects: Vec<PathBuf>,

    /// Read the objects from the cluster of the kubeconfig. Needs --namespace.
    #[arg(long, requires = "namespace")]
    pub cluster: bool,

    /// The name of the InferencePool. llm-d's charts give it the name of the release.
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,

    /// The namespace of the InferencePool. Without it the pool is in the namespace of our release.
    #[arg(long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,

    /// The llm-d chart that the values are for [default: recognized by the keys in the values].
    #[arg(long, value_enum, requires = "values")]
    pub chart: Option<LlmdChart>,

    /// Write values.yaml, picker.yaml and report.md into this folder. Without it, the values go to
    /// stdout and the report to stderr.
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
}

/// A chart of llm-d.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LlmdChart {
    /// With a proxy of its own: llm-d-router-standalone.
    Standalone,
    /// For a gateway that reads InferencePools: llm-d-router-gateway, inferencepool.
    Gateway,
}

/// The result of a migration.
#[derive(Debug)]
pub struct Migrated {
    /// The values of our chart, as YAML.
    pub values: String,
    /// The configuration of each pool that has one: its name and the text.
    pub configs: Vec<(String, String)>,
    /// The report, as Markdown.
    pub report: String,
    /// Whether at least one item has no equivalent or is unknown.
    pub loss: bool,
}

/// Runs the command and returns the exit code: 0 all kept or changed, 1 the input cannot be read, 3
/// an item has no equivalent or is unknown. Prints values to `out` and the report to `err`.
pub async fn run(
    args: MigrateArgs,
    out: &mut dyn std::io::Write,
    err: &mut dyn std::io::Write,
) -> u8 {
    let result = read(&args).await.and_then(|found| {
        let migrated = migrate(found);
        write(&args, &migrated, out, err).map(|()| migrated.loss)
    });
    match result {
        Ok(true) => EXIT_LOSS,
        Ok(false) => 0,
        Err(why) => {
            let _ = writeln!(err, "switchpoint-migrate: {why}"); // nothing can be done about a closed stderr
            EXIT_UNREADABLE
        }
    }
}

fn write(
    args: &MigrateArgs,
    migrated: &Migrated,
    out: &mut dyn std::io::Write,
    err: &mut dyn std::io::Write,
) -> Result<(), String> {
    let Some(folder) = &args.output_dir else {
        let _ = out.write_all(migrated.values.as_bytes()); // a closed stdout is no failure: the exit code still gives the result
        let _ = err.write_all(migrated.report.as_bytes());
        return Ok(());
    };
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
    };
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    write("values.yaml", &migrated.values)?;
    write("report.md", &migrated.report)?;
    match migrated.configs.as_slice() {
        [(_, only)] => write("picker.yaml", only)?,
        several => {
            for (pool, config) in several {
                write(
                    &format!("picker-{}.yaml", pool.replace(['/', '\\'], "-")),
                    config,
                )?;
            }
        }
    }
    let _ = writeln!(
        err,
        "{}",
        migrated.report.lines().nth(2).unwrap_or_default()
    );
    Ok(())
}

async fn read(args: &MigrateArgs) -> Result<FoundPickers, String> {
    let pool = args.pool.as_deref();
    let namespace = args.namespace.as_deref();
    if args.cluster {
        return objects::read(
            &from_cluster(namespace.unwrap_or_default()).await?,
            pool,
            namespace,
        );
    }
    if args.values.is_empty() {
        return objects::read(&files(&args.objects)?, pool, namespace);
    }
    let files = files(&args.values)?;
    let items = values::read(
        files
            .iter()
            .map(|(name, text)| (name.as_str(), text.as_str())),
    )?;
    let picker = of_values(items, pool.unwrap_or_default(), namespace, args.chart);
    Ok(FoundPickers {
        pickers: vec![picker],
        others: Vec::new(),
    })
}

/// Reads files, which may have [`INPUT_BYTES_MAX`] bytes together.
fn files(paths: &[PathBuf]) -> Result<Vec<(String, String)>, String> {
    if paths.len() > FILES_MAX {
        return Err(format!(
            "{} files; at most {FILES_MAX} are read",
            paths.len()
        ));
    }
    let mut rest = INPUT_BYTES_MAX;
    let mut files = Vec::with_capacity(paths.len());
    for path in paths {
        let name = if path == Path::new("-") {
            "stdin".to_owned()
        } else {
            path.display().to_string()
        };
        let mut text = String::new();
        let read = if path == Path::new("-") {
            std::io::stdin()
                .lock()
                .take(rest + 1)
                .read_to_string(&mut text)
        } else {
            std::fs::File::open(path).and_then(|file| file.take(rest + 1).read_to_string(&mut text))
        };
        read.map_err(|e| format!("{name}: {e}"))?;
        rest = u64::try_from(text.len()).ok().and_then(|length| rest.checked_sub(length)).ok_or_else(|| {
            format!("{name}: the input is larger than {INPUT_BYTES_MAX} bytes; with kubectl, name the objects or use a label selector")
        })?;
        files.push((name, text));
    }
    Ok(files)
}

/// Reads the objects of a namespace from its API server.
async fn from_cluster(namespace: &str) -> Result<Vec<(String, String)>, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if namespace.is_empty() || !namespace.chars().all(plain) {
        return Err(format!("{namespace:?} is no name of a namespace"));
    }
    let client = kubernetes::connect().await?;
    let mut lists = Vec::new();
    for (i, resource) in RESOURCES.iter().enumerate() {
        let path = resource.replace("{}", namespace);
        let request = http::Request::get(&path)
            .body(Vec::new())
            .map_err(|e| e.to_string())?;
        match client.request_text(request).await {
            Ok(text) if u64::try_from(text.len()).unwrap_or(u64::MAX) > INPUT_BYTES_MAX => {
                return Err(format!(
                    "{path}: larger than {INPUT_BYTES_MAX} bytes: use kubectl with a label selector and switchpoint-migrate -"
                ));
            }
            Ok(text) => lists.push((path, text)),
            // Ignores an error for a kind of llm-d, because a cluster may lack these kinds.
            Err(_) if i >= RESOURCES.len() / 2 => {}
            Err(error) => return Err(format!("{path}: {error}")),
        }
    }
    Ok(lists)
}

/// Returns the picker that a chart makes from values.
#[must_use]
pub fn of_values(
    items: GivenItems,
    pool: &str,
    namespace: Option<&str>,
    chart: Option<LlmdChart>,
) -> LlmdPicker {
    let standalone = match chart {
        Some(chart) => chart == LlmdChart::Standalone,
        None => {
            let gateway = ["provider", "httpRoute", "experimentalHttpRoute"]
                .iter()
                .any(|path| items.any_below(path));
            let proxy = ["router.proxy", "router.extraServicePorts"]
                .iter()
                .any(|path| items.any_below(path));
            proxy && !gateway && items.get("router.proxy.enabled") != Some(&YamlValue::Flag(false))
        }
    };
    LlmdPicker {
        name: pool.to_owned(),
        namespace: namespace.map(str::to_owned),
        config: None,
        items,
        standalone,
    }
}

/// Migrates the pickers that were found.
#[must_use]
pub fn migrate(found: FoundPickers) -> Migrated {
    let FoundPickers {
        mut pickers,
        others,
    } = found;
    let mut configs = Vec::with_capacity(pickers.len());
    let mut answers = Vec::with_capacity(pickers.len());
    for picker in &mut pickers {
        let mut entries: Vec<ReportEntry> = choose(picker).into_iter().collect();
        let config = match &picker.config {
            Some((source, text)) => {
                let mut migrated =
                    picker::migrate(&with_parsers(picker, text), &defaults::parameters(picker));
                let named = |entry: ReportEntry| ReportEntry {
                    item: format!("{source}: {}", entry.item),
                    ..entry
                };
                entries.extend(std::mem::take(&mut migrated.entries).into_iter().map(named));
                migrated
            }
            None => MigratedConfig::default(),
        };
        configs.push(config);
        answers.push(entries);
    }
    let ChartValues {
        values,
        mut notes,
        unusable,
    } = chart::values(&pickers, &configs);
    let mut reports = Vec::with_capacity(pickers.len());
    for (picker, of_config) in pickers.iter().zip(answers) {
        let entries = std::iter::once(mode(picker))
            .chain(picker.items.report(&unusable))
            .chain(notes.drain(..))
            .chain(of_config);
        reports.push(PoolReport {
            pool: picker.name.clone(),
            entries: entries.collect(),
        });
    }
    let loss = report::count(&reports, MigrationVerdict::NoEquivalent)
        + report::count(&reports, MigrationVerdict::Unknown)
        > 0;
    let named = pickers
        .iter()
        .zip(configs)
        .filter_map(|(picker, config)| Some((picker.name.clone(), config.text?)));
    Migrated {
        values: format!("{HEAD}{}", printer::print(&values, 0)),
        configs: named.collect(),
        report: report::print(&reports, &others),
        loss,
    }
}

/// Reports how requests reach the pool.
fn mode(picker: &LlmdPicker) -> ReportEntry {
    let (item, ours, reason) = if picker.standalone {
        (
            "the proxy in front of the picker",
            "gateway.enabled",
            "the chart's gateway takes its place",
        )
    } else {
        (
            "the gateway that calls the picker",
            "extProc.enabled",
            "it calls the daemon; point the InferencePool's endpointPickerRef to it, and name its pods in networkPolicy.extProcGateways",
        )
    };
    ReportEntry {
        verdict: MigrationVerdict::Kept,
        item: item.to_owned(),
        given: String::new(),
        ours: ours.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Chooses the configuration by the values of the chart if the input has no configuration. Returns
/// an entry for the report if the chosen configuration is missing.
fn choose(picker: &mut LlmdPicker) -> Option<ReportEntry> {
    let running = picker
        .items
        .all()
        .iter()
        .any(|item| item.path == "--config-file" || item.path == "--config-text");
    if picker.config.is_some() {
        return None;
    }
    if running {
        let reason =
            "was not among the objects: the pool has the default configuration until you write one"
                .to_owned();
        let item = "EndpointPickerConfig".to_owned();
        return Some(ReportEntry {
            verdict: MigrationVerdict::Unknown,
            item,
            given: String::new(),
            ours: String::new(),
            reason,
        });
    }
    let (config, answer) = defaults::chosen(&picker.items);
    picker.config = config;
    answer
}

/// Returns the default configuration with the parsers that the values name.
fn with_parsers(picker: &LlmdPicker, text: &str) -> String {
    let Some(parsers) = defaults::parsers(picker) else {
        return text.to_owned();
    };
    let Ok(mut root) = control_plane::config::yaml::parse(text) else {
        return text.to_owned();
    };
    let parser = |name: &String| tree::map(vec![("pluginRef", YamlValue::Text(name.clone()))]);
    let listed = tree::list(parsers.iter().map(parser).collect());
    tree::set(
        &mut root,
        "requestHandler",
        tree::map(vec![("parsers", listed)]),
    );
    printer::print(&root.value, 0)
}
