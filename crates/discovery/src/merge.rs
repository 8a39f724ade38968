//! Merges several sources into one pool, for example the components of prefill and of decode
//! workers.
//!
//! This module sends the first set when every source has sent its own set, because readers would
//! treat decoders without prefillers as the complete pool. After that each source changes
//! independently, and a source that fails keeps its last set. If two sources have an instance of
//! the same name or address, the instance of the earlier source is used.

use std::collections::BTreeSet;

use futures::stream::{SelectAll, StreamExt};

use crate::{Instance, SetChange, SetChanges};

/// One of several sources.
pub struct MergeSource {
    /// The changes of the source's set.
    pub changes: SetChanges,
    /// The labels that the source's instances get, unless an instance already has the label.
    pub labels: Vec<(String, String)>,
}

struct MergedChanges {
    parts: SelectAll<futures::stream::BoxStream<'static, (usize, SetChange)>>,
    labels: Vec<Vec<(String, String)>>,
    sets: Vec<Option<Vec<Instance>>>,
    errors: Vec<Option<String>>,
    /// The error of a source, repeated after the set of another source, so that the error does not
    /// look resolved.
    standing: Option<String>,
}

/// Merges the sources.
#[must_use]
pub fn merge(parts: Vec<MergeSource>) -> SetChanges {
    let sets = vec![None; parts.len()];
    let errors = vec![None; parts.len()];
    let (labels, streams): (Vec<_>, Vec<_>) = parts
        .into_iter()
        .map(|part| (part.labels, part.changes))
        .unzip();
    let numbered = streams
        .into_iter()
        .enumerate()
        .map(|(part, changes)| changes.map(move |change| (part, change)).boxed());
    let merge = MergedChanges {
        parts: futures::stream::select_all(numbered),
        labels,
        sets,
        errors,
        standing: None,
    };
    futures::stream::unfold(merge, |mut merge| async move {
        Some((merge.next().await?, merge))
    })
    .boxed()
}

// === impl MergedChanges ===

impl MergedChanges {
    async fn next(&mut self) -> Option<SetChange> {
        if let Some(why) = self.standing.take() {
            return Some(SetChange::Unreadable(why));
        }
        loop {
            let (part, change) = self.parts.next().await?;
            match change {
                SetChange::Unreadable(why) => {
                    self.errors[part] = Some(why.clone());
                    return Some(SetChange::Unreadable(why));
                }
                SetChange::Reset(instances) => {
                    self.errors[part] = None;
                    self.sets[part] = Some(instances);
                    if let Some(all) = self.all() {
                        self.standing = self.errors.iter().flatten().next().cloned();
                        return Some(SetChange::Reset(all));
                    }
                }
            }
        }
    }

    /// Returns the whole set of instances. Returns `None` until every source has sent its set.
    fn all(&self) -> Option<Vec<Instance>> {
        let mut all = Vec::new();
        let mut names = BTreeSet::new();
        let mut addresses = BTreeSet::new();
        for (set, labels) in self.sets.iter().zip(&self.labels) {
            for instance in set.as_ref()? {
                if addresses.contains(&instance.address)
                    || !names.insert((instance.namespace.clone(), instance.name.clone()))
                {
                    continue;
                }
                addresses.insert(instance.address);
                let mut instance = instance.clone();
                let missing = labels
                    .iter()
                    .filter(|(key, _)| instance.labels.iter().all(|(have, _)| have != key));
                let missing: Vec<_> = missing.cloned().collect();
                instance.labels.extend(missing);
                instance.labels.sort_unstable();
                all.push(instance);
            }
        }
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::UnboundedReceiverStream;

    use super::*;

    fn part(label: &str) -> (mpsc::UnboundedSender<SetChange>, MergeSource) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (
            sender,
            MergeSource {
                changes: UnboundedReceiverStream::new(receiver).boxed(),
                labels: vec![("role".to_owned(), label.to_owned())],
            },
        )
    }

    fn set(all: &[(&str, u16)]) -> SetChange {
        SetChange::Reset(
            all.iter()
                .map(|(name, port)| Instance::new(*name, ([10, 0, 0, 1], *port).into()))
                .collect(),
        )
    }

    fn next(changes: &mut SetChanges) -> Option<String> {
        let text = |i: &Instance| format!("{}:{}={}", i.name, i.address.port(), i.labels[0].1);
        changes
            .next()
            .now_or_never()
            .map(|change| match change.unwrap() {
                SetChange::Reset(all) => all.iter().map(text).collect::<Vec<_>>().join(" "),
                SetChange::Unreadable(why) => format!("! {why}"),
            })
    }

    #[test]
    fn parts_wait_for_each_other_once_and_then_change_alone() {
        let ((decode, a), (prefill, b)) = (part("decode"), part("prefill"));
        let mut merged = merge(vec![a, b]);
        decode.send(set(&[("d", 1)])).unwrap();
        assert_eq!(
            next(&mut merged),
            None,
            "decoders alone are not the complete pool"
        );
        prefill.send(set(&[("p", 2), ("d", 3), ("q", 1)])).unwrap();
        assert_eq!(
            next(&mut merged).unwrap(),
            "d:1=decode p:2=prefill",
            "each name and address occurs once"
        );
        prefill
            .send(SetChange::Unreadable("gone".to_owned()))
            .unwrap();
        assert_eq!(next(&mut merged).unwrap(), "! gone");
        decode.send(set(&[])).unwrap();
        assert_eq!(
            next(&mut merged).unwrap(),
            "p:2=prefill d:3=prefill q:1=prefill",
            "the last prefillers stay"
        );
        assert_eq!(
            next(&mut merged).unwrap(),
            "! gone",
            "and the error is repeated"
        );
        prefill.send(set(&[])).unwrap();
        assert_eq!(next(&mut merged).unwrap(), "");
        assert_eq!(next(&mut merged), None);
    }
}
