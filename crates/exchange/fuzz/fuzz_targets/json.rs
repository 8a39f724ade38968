//! Reads any bytes. The reader must accept what `serde_json` accepts, except for too deep nesting.
//! Walking and skipping must agree, and the values must be the same.
#![no_main]

use exchange::json::{JsonError, JsonKind, JsonReader};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    // `IgnoredAny` checks the grammar and builds nothing: it accepts lone surrogates and huge
    // numbers, and does not check UTF-8.
    let oracle = std::str::from_utf8(bytes).is_ok()
        && serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok();
    let mut reader = JsonReader::new(bytes);
    let skipped = reader.skip().and_then(|_| reader.end());
    match skipped {
        Ok(()) => assert!(oracle),
        Err(JsonError::Invalid { offset }) => assert!(!oracle && offset <= bytes.len()),
        Err(JsonError::TooDeep) => {}
    }
    let mut reader = JsonReader::new(bytes);
    let built = build(&mut reader, bytes).and_then(|value| reader.end().map(|()| value));
    assert_eq!(built.as_ref().err(), skipped.as_ref().err());
    if let (Ok(ours), Ok(theirs)) = (built, serde_json::from_slice::<Value>(bytes)) {
        assert_eq!(ours, theirs);
    }
});

fn build(reader: &mut JsonReader<'_>, bytes: &[u8]) -> Result<Value, JsonError> {
    Ok(match reader.peek()? {
        JsonKind::Object => {
            let mut members = serde_json::Map::new();
            reader.members(|reader, key| {
                members.insert(key.text().into_owned(), build(reader, bytes)?);
                Ok(())
            })?;
            members.into()
        }
        JsonKind::Array => {
            let mut elements = Vec::new();
            reader.elements(|reader| {
                elements.push(build(reader, bytes)?);
                Ok(())
            })?;
            elements.into()
        }
        JsonKind::String => reader.string()?.map(|text| text.text().into_owned()).into(),
        JsonKind::Number => serde_json::from_slice(&bytes[reader.skip()?]).unwrap_or(Value::Null),
        JsonKind::Boolean => reader.boolean()?.into(),
        JsonKind::Null => reader.skip().map(|_| Value::Null)?,
    })
}
