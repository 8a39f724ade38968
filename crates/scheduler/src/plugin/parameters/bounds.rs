//! Checks how deep and how long the value of a parameter is.

use super::{ParameterValue, VALUE_DEPTH_MAX, VALUES_MAX};

// === impl ParameterValue ===

impl ParameterValue {
    /// Whether the value is within [`VALUE_DEPTH_MAX`] and [`VALUES_MAX`].
    pub fn within_bounds(&self) -> bool {
        let mut left = VALUES_MAX;
        self.fits(VALUE_DEPTH_MAX, &mut left)
    }

    fn fits(&self, depth_left: usize, values_left: &mut usize) -> bool {
        let Some(left) = values_left.checked_sub(1) else {
            return false;
        };
        *values_left = left;
        match self {
            Self::Number(_) | Self::Flag(_) | Self::Text(_) => true,
            Self::List(values) => {
                depth_left > 0
                    && values
                        .iter()
                        .all(|value| value.fits(depth_left - 1, values_left))
            }
            Self::Map(entries) => {
                depth_left > 0
                    && entries
                        .iter()
                        .all(|(_, value)| value.fits(depth_left - 1, values_left))
            }
        }
    }
}
