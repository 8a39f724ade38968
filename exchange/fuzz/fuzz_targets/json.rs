//! Any bytes: the reader accepts what `serde_json` accepts, but for what is nested too deep; walking and skipping agree; and the values are the same.
#![no_main]

use exchange::json::{JsonError, Kind, Reader};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    // `IgnoredAny` checks the grammar and builds nothing: it takes lone surrogates and huge numbers, and does not look at UTF-8.
    let oracle = std::str::from_utf8(bytes).is_ok() && serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok();
    let mut reader = Reader::new(bytes);
    let skipped = reader.skip().and_then(|_| reader.end());
    match skipped {
        Ok(()) => assert!(oracle),
        Err(JsonError::Invalid { offset }) => assert!(!oracle && offset <= bytes.len()),
        Err(JsonError::TooDeep) => {}
    }
    let mut reader = Reader::new(bytes);
    let built = build(&mut reader, bytes).and_then(|value| reader.end().map(|()| value));
    assert_eq!(built.as_ref().err(), skipped.as_ref().err());
    if let (Ok(ours), Ok(theirs)) = (built, serde_json::from_slice::<Value>(bytes)) {
        assert_eq!(ours, theirs);
    }
});

fn build(reader: &mut Reader<'_>, bytes: &[u8]) -> Result<Value, JsonError> {
    Ok(match reader.peek()? {
        Kind::Object => {
            let mut members = serde_json::Map::new();
            reader.members(|reader, key| {
                members.insert(key.text().into_owned(), build(reader, bytes)?);
                Ok(())
            })?;
            members.into()
        }
        Kind::Array => {
            let mut elements = Vec::new();
            reader.elements(|reader| {
                elements.push(build(reader, bytes)?);
                Ok(())
            })?;
            elements.into()
        }
        Kind::String => reader.string()?.map(|text| text.text().into_owned()).into(),
        Kind::Number => serde_json::from_slice(&bytes[reader.skip()?]).unwrap_or(Value::Null),
        Kind::Boolean => reader.boolean()?.into(),
        Kind::Null => reader.skip().map(|_| Value::Null)?,
    })
}
