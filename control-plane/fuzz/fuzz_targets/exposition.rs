//! Raw bytes as a page: no panic, and the same result however the bytes are split into chunks.

#![no_main]

use control_plane::scrape::exposition::{
    ExpositionParser, LineCounts, LineInterest, MetricSample, ParseProgress, SampleVisitor,
};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Default, PartialEq)]
struct Notes {
    stop: Option<u8>,
    seen: Vec<(Vec<u8>, Vec<(Vec<u8>, Vec<u8>)>, u64)>,
}

impl SampleVisitor for Notes {
    fn interest(&mut self, name: &[u8]) -> LineInterest {
        match name.first() {
            first if first.copied() == self.stop => LineInterest::Stop,
            Some(b'i') => LineInterest::Ignore,
            _ => LineInterest::Take,
        }
    }

    fn sample(&mut self, sample: &MetricSample<'_>) {
        let labels = sample
            .labels()
            .map(|(name, value)| (name.into_owned(), value.into_owned()))
            .collect();
        self.seen
            .push((sample.name.to_vec(), labels, sample.value.to_bits()));
    }
}

fn read<'a>(chunks: impl Iterator<Item = &'a [u8]>, stop: Option<u8>) -> (Notes, LineCounts) {
    let mut notes = Notes {
        stop,
        ..Notes::default()
    };
    let mut parser = ExpositionParser::default();
    let mut done = false;
    for chunk in chunks {
        let progress = parser.feed(chunk, &mut notes);
        assert!(!done || progress == ParseProgress::Done);
        done = progress == ParseProgress::Done;
    }
    let counts = parser.finish(&mut notes);
    (notes, counts)
}

fuzz_target!(|input: (u8, Option<u8>, &[u8])| {
    let (chunk, stop, page) = input;
    let whole = read(std::iter::once(page), stop);
    assert!(whole.0.seen.len() as u64 + whole.1.skipped <= whole.1.read);
    assert_eq!(whole, read(page.chunks(usize::from(chunk).max(1)), stop));
});
