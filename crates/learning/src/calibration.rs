//! Accuracy of predictions, measured when their outcomes are known.

/// The sums, over predictions with a known outcome, from which the accuracy is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Calibration {
    count: u64,
    relative_error: f64,
    pinball: f64,
    covered: u64,
}

// === impl Calibration ===

impl Calibration {
    /// Adds one outcome: the predicted median and p90, and the actual time, all in ms. Ignores it
    /// if a number is not finite or the actual time is not positive.
    pub fn add(&mut self, middle_ms: f32, p90_ms: f32, actual_ms: f32) {
        let all = [middle_ms, p90_ms, actual_ms];
        if !all.iter().all(|ms| ms.is_finite()) || actual_ms <= 0.0 {
            return;
        }
        let [middle, p90, actual] = all.map(f64::from);
        self.count += 1;
        self.relative_error += (middle - actual).abs() / actual;
        self.pinball += (0.9 * (actual - p90)).max(0.1 * (p90 - actual));
        self.covered += u64::from(actual <= p90);
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean absolute error of the median, as a share of the actual time (MAPE); `None`
    /// without outcomes.
    pub fn mape(&self) -> Option<f64> {
        self.mean(self.relative_error)
    }

    /// Returns the mean pinball loss of the p90, in ms: 0.9 of the amount by which outcomes exceed
    /// the p90, and 0.1 of the amount by which they stay below it. The true p90 has the lowest
    /// loss. Returns `None` without outcomes.
    pub fn pinball90_ms(&self) -> Option<f64> {
        self.mean(self.pinball)
    }

    /// Returns the share of outcomes at or below the predicted p90, which should be 0.9. Returns
    /// `None` without outcomes.
    pub fn coverage90(&self) -> Option<f64> {
        self.mean(count(self.covered))
    }

    fn mean(&self, sum: f64) -> Option<f64> {
        (self.count > 0).then(|| sum / count(self.count))
    }
}

// The cast is exact, because counts stay far below 2^52.
fn count(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_four_outcomes() {
        let mut calibration = Calibration::default();
        assert_eq!((calibration.count(), calibration.mape()), (0, None));
        for actual in [100.0, 80.0, 200.0, 50.0] {
            calibration.add(100.0, 150.0, actual);
        }
        for absurd in [f32::NAN, 0.0, -1.0, f32::INFINITY] {
            calibration.add(100.0, 150.0, absurd);
        }
        assert_eq!(calibration.count(), 4);
        assert_eq!(calibration.coverage90(), Some(0.75));
        assert_eq!(calibration.mape(), Some((0.0 + 0.25 + 0.5 + 1.0) / 4.0));
        assert!(
            (calibration.pinball90_ms().unwrap() - (5.0 + 7.0 + 45.0 + 10.0) / 4.0).abs() < 1e-9
        );
    }
}
