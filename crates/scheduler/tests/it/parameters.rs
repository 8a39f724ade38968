//! The parameters of the plugins that require parameters, and of a few other plugins. The property
//! tests and the bench `schedule` use this file.

/// Plugin types, each with its parameters.
const PARAMETERS: [(&str, &str); 7] = [
    (
        "header-label-affinity-scorer",
        "headerName=X-Tier labelKey=tier",
    ),
    (
        "endpoint-attribute-scorer",
        "attributeKey=depth algorithm={type:linear_lower_is_better}",
    ),
    (
        "endpoint-attribute-filter",
        "attribute=depth algorithm={type:threshold,threshold:{operator:LessThan,value:2}}",
    ),
    (
        "utilization-filter",
        "conditions=[{metric:waiting-queue,maxValue:3},{metric:active-requests,maxValue:2}]",
    ),
    (
        "label-selector-filter",
        "matchExpressions=[{key:tier,operator:NotIn,values:[silver]}]",
    ),
    ("by-label", "label=tier validValues=[gold]"),
    ("prefix-cache-affinity-filter", "peakPrefillThroughput=100"),
];

/// Returns the parameters of a plugin type, each as `name=value`.
pub fn words(plugin_type: &str) -> Vec<&'static str> {
    let given = PARAMETERS
        .iter()
        .find(|(name, _)| *name == plugin_type)
        .map_or("", |(_, given)| given);
    given.split(' ').collect()
}
