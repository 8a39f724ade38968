use super::*;

const KNOWN: &[Parameter] = &[
    Parameter {
        name: "threshold",
        default: ParameterDefault::Number(4.0),
        doc: "requests, 0 to 10",
    },
    Parameter {
        name: "strict",
        default: ParameterDefault::Flag(true),
        doc: "true or false",
    },
    Parameter {
        name: "strategy",
        default: ParameterDefault::Text("least"),
        doc: "least or most",
    },
];

fn given(name: &str, value: ParameterValue) -> Vec<(String, ParameterValue)> {
    vec![(name.to_owned(), value)]
}

fn refusal<T: fmt::Debug>(result: Result<T, InvalidParameter>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_required_text_must_say_something() {
    const REQUIRED: &[Parameter] = &[Parameter {
        name: "label",
        default: ParameterDefault::Required,
        doc: "a label",
    }];
    let check = |text: &str| {
        Parameters::check(
            REQUIRED,
            &given("label", ParameterValue::Text(text.to_owned())),
        )
        .map(drop)
    };
    assert_eq!(check("zone"), Ok(()));
    assert_eq!(
        check(""),
        Err(InvalidParameter::Missing("label".to_owned()))
    );
}

#[test]
fn defaults_where_nothing_is_given() {
    let parameters = Parameters::check(KNOWN, &[]).unwrap();
    assert_eq!(parameters.number("threshold", 0.0..=10.0), Ok(4.0));
    assert_eq!(parameters.integer("threshold", 0..=10), Ok(4));
    assert_eq!(parameters.flag("strict"), Ok(true));
    assert_eq!(parameters.text("strategy"), Ok("least"));
    assert_eq!(
        parameters.choice("strategy", &[("most", 1), ("least", 2)]),
        Ok(2)
    );
}

#[test]
fn given_values_override_defaults() {
    let all = [
        ("threshold".to_owned(), ParameterValue::Number(10.0)),
        ("strict".to_owned(), ParameterValue::Flag(false)),
        (
            "strategy".to_owned(),
            ParameterValue::Text("most".to_owned()),
        ),
    ];
    let parameters = Parameters::check(KNOWN, &all).unwrap();
    assert_eq!(parameters.integer("threshold", 0..=10), Ok(10));
    assert_eq!(parameters.flag("strict"), Ok(false));
    assert_eq!(
        parameters.choice("strategy", &[("most", 1), ("least", 2)]),
        Ok(1)
    );
}

#[test]
fn unknown_names_suggest_a_known_one_and_list_all() {
    let check = |name| {
        refusal(Parameters::check(
            KNOWN,
            &given(name, ParameterValue::Flag(true)),
        ))
    };
    assert_eq!(
        check("treshold"),
        "unknown parameter `treshold`; did you mean `threshold`?; known: `threshold`, `strict`, `strategy`"
    );
    assert_eq!(
        check("colour"),
        "unknown parameter `colour`; known: `threshold`, `strict`, `strategy`"
    );
    let given = given("threshold", ParameterValue::Flag(true));
    assert_eq!(
        refusal(Parameters::check(&[], &given)),
        "unknown parameter `threshold`; it has none"
    );
}

#[test]
fn given_twice_is_refused() {
    let twice = [
        given("strict", ParameterValue::Flag(true)),
        given("strict", ParameterValue::Flag(true)),
    ]
    .concat();
    assert_eq!(
        refusal(Parameters::check(KNOWN, &twice)),
        "parameter `strict` is given twice"
    );
}

#[test]
fn wrong_types_are_refused_when_checked() {
    let check = |name, value| refusal(Parameters::check(KNOWN, &given(name, value)));
    assert_eq!(
        check("threshold", ParameterValue::Text("4".to_owned())),
        "parameter `threshold` takes a number"
    );
    assert_eq!(
        check("strict", ParameterValue::Number(1.0)),
        "parameter `strict` takes true or false"
    );
    assert_eq!(
        check("strategy", ParameterValue::Flag(false)),
        "parameter `strategy` takes text"
    );
}

#[test]
fn ranges_hold_at_both_ends() {
    let number = |value| {
        let given = given("threshold", ParameterValue::Number(value));
        Parameters::check(KNOWN, &given)
            .unwrap()
            .number("threshold", 0.0..=10.0)
    };
    assert_eq!((number(0.0), number(10.0)), (Ok(0.0), Ok(10.0)));
    for bad in [-0.001, 10.001, f64::NAN, f64::INFINITY] {
        assert_eq!(
            refusal(number(bad)),
            "parameter `threshold` is out of range: requests, 0 to 10"
        );
    }
}

#[test]
fn whole_numbers_and_choices() {
    let given = [
        given("threshold", ParameterValue::Number(3.5)),
        given("strategy", ParameterValue::Text("some".to_owned())),
    ]
    .concat();
    let parameters = Parameters::check(KNOWN, &given).unwrap();
    assert_eq!(
        refusal(parameters.integer("threshold", 0..=10)),
        "parameter `threshold` takes a whole number"
    );
    assert_eq!(
        refusal(parameters.choice("strategy", &[("most", 1)])),
        "parameter `strategy` is out of range: least or most"
    );
}

#[test]
fn reading_an_undeclared_parameter_is_an_error() {
    let parameters = Parameters::check(KNOWN, &[]).unwrap();
    assert!(refusal(parameters.flag("undeclared")).starts_with("unknown parameter `undeclared`"));
    assert_eq!(
        refusal(parameters.flag("threshold")),
        "parameter `threshold` takes true or false"
    );
    assert_eq!(
        refusal(parameters.text("strict")),
        "parameter `strict` takes text"
    );
    assert_eq!(
        refusal(parameters.number("strict", 0.0..=1.0)),
        "parameter `strict` takes a number"
    );
}

const CONDITION: &[Parameter] = &[
    Parameter {
        name: "metric",
        default: ParameterDefault::Required,
        doc: "its name",
    },
    Parameter {
        name: "maxValue",
        default: ParameterDefault::Number(1.0),
        doc: "0 to 10",
    },
];
const DEEP: &[Parameter] = &[
    Parameter {
        name: "conditions",
        default: ParameterDefault::Structured("[{metric, maxValue}]"),
        doc: "all must hold",
    },
    Parameter {
        name: "labels",
        default: ParameterDefault::Structured("{KEY: VALUE}"),
        doc: "labels",
    },
    Parameter {
        name: "names",
        default: ParameterDefault::Structured("[NAME]"),
        doc: "names",
    },
];

fn text(text: &str) -> ParameterValue {
    ParameterValue::Text(text.to_owned())
}

fn map(entries: &[(&str, ParameterValue)]) -> ParameterValue {
    ParameterValue::Map(
        entries
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect(),
    )
}

fn conditions(given: &[(String, ParameterValue)]) -> Result<Vec<(&str, f64)>, InvalidParameter> {
    let read = |p: &Parameters<'_>| p.number("maxValue", 0.0..=10.0);
    let parameters = Parameters::check(DEEP, given)?;
    let numbers = parameters.each("conditions", CONDITION, read)?;
    Ok(parameters
        .each("conditions", CONDITION, |p| p.text("metric"))?
        .into_iter()
        .zip(numbers)
        .collect())
}

#[test]
fn structured_parameters_are_absent_unless_given() {
    let parameters = Parameters::check(DEEP, &[]).unwrap();
    assert_eq!(parameters.structured("conditions"), Ok(None));
    assert_eq!(
        (parameters.map("labels"), parameters.list("names")),
        (Ok([].as_slice()), Ok([].as_slice()))
    );
    assert_eq!(parameters.nested("labels", CONDITION, |_| Ok(())), Ok(None));
    assert_eq!(conditions(&[]), Ok(vec![]));
}

#[test]
fn structured_parameters_are_read_by_shape() {
    let given = [
        given("labels", map(&[("b", text("2")), ("a", text("1"))])),
        given("names", ParameterValue::List(vec![text("x"), text("y")])),
        given(
            "conditions",
            ParameterValue::List(vec![
                map(&[("metric", text("q"))]),
                map(&[
                    ("maxValue", ParameterValue::Number(3.0)),
                    ("metric", text("r")),
                ]),
            ]),
        ),
    ]
    .concat();
    let parameters = Parameters::check(DEEP, &given).unwrap();
    assert_eq!(
        parameters.text_map("labels"),
        Ok(vec![("b", "2"), ("a", "1")]),
        "in the order written"
    );
    assert_eq!(parameters.texts("names"), Ok(vec!["x", "y"]));
    assert_eq!(conditions(&given), Ok(vec![("q", 1.0), ("r", 3.0)]));
    let one = self::given("labels", map(&[("metric", text("q"))]));
    assert_eq!(
        Parameters::check(DEEP, &one)
            .unwrap()
            .nested("labels", CONDITION, |p| p.text("metric")),
        Ok(Some("q"))
    );
}

#[test]
fn errors_inside_a_value_name_the_path_to_it() {
    let said = |items: Vec<ParameterValue>| {
        refusal(conditions(&given(
            "conditions",
            ParameterValue::List(items),
        )))
    };
    assert_eq!(
        said(vec![map(&[("metric", text("q"))]), map(&[])]),
        "in `conditions[1]`: parameter `metric` must be given"
    );
    assert_eq!(
        said(vec![map(&[("metrics", text("q"))])]),
        "in `conditions[0]`: unknown parameter `metrics`; did you mean `metric`?; known: `metric`, `maxValue`"
    );
    assert_eq!(
        said(vec![map(&[
            ("metric", text("q")),
            ("maxValue", ParameterValue::Number(11.0))
        ])]),
        "in `conditions[0]`: parameter `maxValue` is out of range: 0 to 10"
    );
    assert_eq!(
        said(vec![text("q")]),
        "parameter `conditions` takes [{metric, maxValue}]"
    );
    let twice = given("labels", map(&[("a", text("1")), ("a", text("2"))]));
    assert_eq!(
        refusal(Parameters::check(DEEP, &twice).unwrap().text_map("labels")),
        "in `labels`: parameter `a` is given twice"
    );
}

#[test]
fn another_shape_is_refused() {
    let check = |name, value| refusal(Parameters::check(DEEP, &given(name, value)));
    assert_eq!(check("names", text("x")), "parameter `names` takes [NAME]");
    let list = given("labels", ParameterValue::List(vec![]));
    assert_eq!(
        refusal(Parameters::check(DEEP, &list).unwrap().map("labels")),
        "parameter `labels` takes {KEY: VALUE}"
    );
    let map_for_list = given("names", map(&[]));
    assert_eq!(
        refusal(
            Parameters::check(DEEP, &map_for_list)
                .unwrap()
                .texts("names")
        ),
        "parameter `names` takes [NAME]"
    );
    let mixed = given(
        "names",
        ParameterValue::List(vec![ParameterValue::Flag(true)]),
    );
    assert_eq!(
        refusal(Parameters::check(DEEP, &mixed).unwrap().texts("names")),
        "parameter `names` takes [NAME]"
    );
    let numbers = given("labels", map(&[("a", ParameterValue::Number(1.0))]));
    assert_eq!(
        refusal(
            Parameters::check(DEEP, &numbers)
                .unwrap()
                .text_map("labels")
        ),
        "parameter `labels` takes {KEY: VALUE}"
    );
    assert_eq!(
        refusal(Parameters::check(KNOWN, &given_list())),
        "parameter `strategy` takes text"
    );
}

fn given_list() -> Vec<(String, ParameterValue)> {
    given("strategy", ParameterValue::List(vec![]))
}

#[test]
fn depth_and_size_are_bounded() {
    let nest = |depth| {
        (0..depth).fold(ParameterValue::Flag(true), |inner, _| {
            ParameterValue::List(vec![inner])
        })
    };
    assert!(nest(VALUE_DEPTH_MAX).within_bounds());
    assert!(!nest(VALUE_DEPTH_MAX + 1).within_bounds());
    let maps = |levels: usize| {
        (1..levels).fold(ParameterValue::Map(Vec::new()), |inner, _| {
            ParameterValue::Map(vec![("inner".to_owned(), inner)])
        })
    };
    assert!(maps(VALUE_DEPTH_MAX).within_bounds());
    assert!(!maps(VALUE_DEPTH_MAX + 1).within_bounds());
    let wide = |count| ParameterValue::List(vec![map(&[("k", ParameterValue::Flag(true))]); count]);
    assert!(wide((VALUES_MAX - 1) / 2).within_bounds());
    assert!(!wide(VALUES_MAX / 2 + 1).within_bounds());
    assert!(
        refusal(Parameters::check(DEEP, &given("names", nest(9))))
            .starts_with("parameter `names` is too large")
    );
}
