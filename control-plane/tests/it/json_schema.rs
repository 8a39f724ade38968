//! Compares JSON with a schema: the keywords that the committed schemas use, and no others.

use serde_json::{Map, Value};

/// A schema with definitions.
pub(crate) struct JsonSchema(Value);

/// Keywords that only describe, so the comparison ignores them.
const DESCRIPTIONS: [&str; 4] = ["$schema", "title", "description", "$defs"];

// === impl JsonSchema ===

impl JsonSchema {
    pub(crate) fn new(schema: Value) -> Self {
        Self(schema)
    }

    /// Panics with the place of the first difference from the definition `name`.
    pub(crate) fn check(&self, name: &str, value: &Value) {
        if let Err(why) = self.compare(&self.0["$defs"][name], value, name) {
            panic!("{why} in {value:#}");
        }
    }

    fn compare(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        let schema = schema
            .as_object()
            .ok_or_else(|| format!("{at}: no schema"))?;
        for (keyword, expected) in schema {
            match keyword.as_str() {
                known if DESCRIPTIONS.contains(&known) => {}
                "$ref" => {
                    let name = expected
                        .as_str()
                        .unwrap_or_default()
                        .trim_start_matches("#/$defs/");
                    self.compare(&self.0["$defs"][name], value, at)?;
                }
                "type" => has_type(expected, value, at)?,
                "enum" if !expected.as_array().is_some_and(|all| all.contains(value)) => {
                    return Err(format!("{at}: {value} is not in {expected}"));
                }
                "enum" => {}
                "minimum"
                    if value
                        .as_f64()
                        .is_some_and(|number| Some(number) < expected.as_f64()) =>
                {
                    return Err(format!("{at}: {value} is below {expected}"));
                }
                "minimum" => {}
                "anyOf" => {
                    let fits = |schema: &Value| self.compare(schema, value, at).is_ok();
                    if !expected.as_array().is_some_and(|all| all.iter().any(fits)) {
                        return Err(format!("{at}: {value} fits none of {expected}"));
                    }
                }
                "items" => {
                    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                        self.compare(expected, item, &format!("{at}[{index}]"))?;
                    }
                }
                "required" => {
                    let missing = |name: &&Value| {
                        value.is_object() && value.get(name.as_str().unwrap_or_default()).is_none()
                    };
                    if let Some(name) = expected.as_array().into_iter().flatten().find(missing) {
                        return Err(format!("{at}: no {name}"));
                    }
                }
                "properties" => {}
                "additionalProperties" => self.compare_members(schema, value, at)?,
                other => return Err(format!("{at}: this test does not know the keyword {other}")),
            }
        }
        Ok(())
    }

    fn compare_members(
        &self,
        schema: &Map<String, Value>,
        value: &Value,
        at: &str,
    ) -> Result<(), String> {
        let other = &schema["additionalProperties"];
        for (name, member) in value.as_object().into_iter().flatten() {
            let at = format!("{at}.{name}");
            match (
                schema.get("properties").and_then(|known| known.get(name)),
                other,
            ) {
                (Some(schema), _) => self.compare(schema, member, &at)?,
                (None, Value::Bool(true)) => {}
                (None, Value::Bool(false)) => return Err(format!("{at}: not in the schema")),
                (None, schema) => self.compare(schema, member, &at)?,
            }
        }
        Ok(())
    }
}

fn has_type(expected: &Value, value: &Value, at: &str) -> Result<(), String> {
    let names: Vec<&str> = expected
        .as_str()
        .into_iter()
        .chain(
            expected
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str),
        )
        .collect();
    let fits = |name: &&str| match *name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => false,
    };
    if names.iter().any(fits) {
        Ok(())
    } else {
        Err(format!("{at}: {value} is not of type {expected}"))
    }
}

#[test]
fn differences_are_found() {
    let schema = JsonSchema::new(serde_json::json!({"$defs": {
        "Row": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}, "required": ["n"], "additionalProperties": false},
        "Rows": {"type": "array", "items": {"$ref": "#/$defs/Row"}},
        "Odd": {"pattern": "x"},
    }}));
    let check = |name: &str, value: Value| {
        schema
            .compare(&schema.0["$defs"][name], &value, "")
            .err()
            .unwrap_or_default()
    };
    assert_eq!(check("Rows", serde_json::json!([{"n": 1}])), "");
    assert_eq!(
        check("Rows", serde_json::json!([{"n": -1}])),
        "[0].n: -1 is below 0"
    );
    assert_eq!(
        check("Rows", serde_json::json!([{"n": 0.5}])),
        "[0].n: 0.5 is not of type \"integer\""
    );
    assert_eq!(check("Row", serde_json::json!({})), ": no \"n\"");
    assert_eq!(
        check("Row", serde_json::json!({"n": 1, "m": 1})),
        ".m: not in the schema"
    );
    assert_eq!(
        check("Odd", serde_json::json!("x")),
        ": this test does not know the keyword pattern"
    );
}
