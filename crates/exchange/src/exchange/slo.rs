//! The SLO headers of a request. The headers have an effect only if the pool predicts latency. Then
//! a request with an invalid header is refused (400).

use crate::number;
use scheduler::Slo;

use crate::headers;
use crate::reply::Refusal;

/// The longest SLO, in ms: one hour, which is longer than any request. An hour fits into the
/// ledger's microseconds.
const SLO_MS_MAX: f64 = 3_600_000.0;

/// The values of the headers, unparsed.
#[derive(Debug, Default)]
pub(super) struct SloHeaders<'h> {
    ttft: Option<SloHeaderValue<'h>>,
    tpot: Option<SloHeaderValue<'h>>,
    prediction_based: Option<SloHeaderValue<'h>>,
}

/// A header that has two names.
#[derive(Clone, Copy, Debug)]
struct SloHeaderValue<'h> {
    /// The rank of the name that was used, where 0 is the current name.
    rank: usize,
    header: &'static str,
    value: &'h [u8],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestedSlo {
    pub(super) slo: Slo,
    pub(super) prediction_based: bool,
}

/// The name of an invalid header, and a description of valid values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidSloHeader {
    header: &'static str,
    must_be: &'static str,
}

// === impl SloHeaders ===

impl<'h> SloHeaders<'h> {
    /// Keeps the header if it is an SLO header. If a name occurs several times, the first value is
    /// used.
    pub(super) fn offer(&mut self, name: &[u8], value: &'h [u8]) {
        for (names, slot) in [
            (headers::SLO_TTFT, &mut self.ttft),
            (headers::SLO_TPOT, &mut self.tpot),
            (headers::PREDICTION_BASED, &mut self.prediction_based),
        ] {
            if let Some((rank, header)) = names
                .into_iter()
                .enumerate()
                .find(|(_, known)| known.as_bytes() == name)
                && slot.is_none_or(|before| rank < before.rank)
            {
                *slot = Some(SloHeaderValue {
                    rank,
                    header,
                    value,
                });
            }
        }
    }

    pub(super) fn read(&self) -> Result<RequestedSlo, InvalidSloHeader> {
        let slo = Slo {
            ttft_us: self.ttft.map(micros).transpose()?,
            tpot_us: self.tpot.map(micros).transpose()?,
        };
        Ok(RequestedSlo {
            slo,
            prediction_based: self
                .prediction_based
                .map(flag)
                .transpose()?
                .unwrap_or(false),
        })
    }
}

fn micros(given: SloHeaderValue<'_>) -> Result<u32, InvalidSloHeader> {
    let ms = number::parse(given.value.trim_ascii()).filter(|ms| *ms > 0.0 && *ms <= SLO_MS_MAX);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "above 0, and an hour at most"
    )]
    let us = ms.map(|ms| ((ms * 1_000.0) as u32).max(1));
    us.ok_or(InvalidSloHeader {
        header: given.header,
        must_be: "a number of milliseconds above 0 and up to 3600000",
    })
}

/// Reads a boolean in Go's syntax.
fn flag(given: SloHeaderValue<'_>) -> Result<bool, InvalidSloHeader> {
    match given.value.trim_ascii() {
        b"1" | b"t" | b"T" | b"true" | b"True" | b"TRUE" => Ok(true),
        b"0" | b"f" | b"F" | b"false" | b"False" | b"FALSE" => Ok(false),
        _ => Err(InvalidSloHeader {
            header: given.header,
            must_be: "true or false",
        }),
    }
}

// === impl Refusal ===

impl From<InvalidSloHeader> for Refusal {
    fn from(InvalidSloHeader { header, must_be }: InvalidSloHeader) -> Self {
        Self::Header {
            name: header,
            must_be,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(pairs: &[(&'static str, &str)]) -> Result<RequestedSlo, InvalidSloHeader> {
        let mut slo = SloHeaders::default();
        pairs
            .iter()
            .for_each(|(name, value)| slo.offer(name.as_bytes(), value.as_bytes()));
        slo.read()
    }

    fn ttft(pairs: &[(&'static str, &str)]) -> Result<Option<u32>, &'static str> {
        read(pairs)
            .map(|requested| requested.slo.ttft_us)
            .map_err(|unreadable| unreadable.header)
    }

    #[test]
    fn an_slo_is_a_number_of_milliseconds_above_zero_and_below_an_hour() {
        for (good, us) in [
            ("200", 200_000),
            ("0.5", 500),
            (" 80 ", 80_000),
            ("1e3", 1_000_000),
            ("3600000", 3_600_000_000),
            ("1e-9", 1),
        ] {
            assert_eq!(ttft(&[("x-slo-ttft-ms", good)]), Ok(Some(us)), "{good}");
        }
        for bad in [
            "", "0", "-1", "-0", "nan", "NaN", "inf", "-inf", "1e9", "3600001", "1e39", "80ms",
            "1,5", "0x10", "\u{661}", "8 0",
        ] {
            assert_eq!(
                ttft(&[("x-slo-ttft-ms", bad)]),
                Err("x-slo-ttft-ms"),
                "{bad}"
            );
        }
    }

    #[test]
    fn the_current_name_beats_the_older_one_in_whatever_order_and_the_first_value_the_second() {
        let current = "x-llm-d-slo-ttft-ms";
        let older = "x-slo-ttft-ms";
        assert_eq!(ttft(&[]), Ok(None));
        assert_eq!(ttft(&[(older, "1"), (current, "2")]), Ok(Some(2_000)));
        assert_eq!(ttft(&[(current, "2"), (older, "1")]), Ok(Some(2_000)));
        assert_eq!(ttft(&[(older, "1"), (older, "3")]), Ok(Some(1_000)));
        assert_eq!(
            ttft(&[(older, "1"), (current, "x")]),
            Err(current),
            "only the header that counts must be valid"
        );
        assert_eq!(ttft(&[(older, "x"), (current, "2")]), Ok(Some(2_000)));
        assert_eq!(ttft(&[("x-slo-tpot-ms", "1")]), Ok(None));
    }

    #[test]
    fn prediction_based_routing_is_true_or_false() {
        let based = |name: &'static str, value: &str| {
            read(&[(name, value)]).map(|requested| requested.prediction_based)
        };
        for name in ["predictionbasedrouting", "x-prediction-based-scheduling"] {
            assert_eq!(
                ["true", "True", "1", "t"].map(|value| based(name, value)),
                [Ok(true); 4]
            );
            assert_eq!(
                ["false", "False", "0", " F "].map(|value| based(name, value)),
                [Ok(false); 4]
            );
            for bad in ["", "yes", "truee", "2", "\u{fe}"] {
                assert_eq!(
                    based(name, bad),
                    Err(InvalidSloHeader {
                        header: name,
                        must_be: "true or false"
                    }),
                    "{bad}"
                );
            }
        }
        assert_eq!(read(&[]), Ok(RequestedSlo::default()));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_slo_in_range_or_refused(value in prop::collection::vec(any::<u8>(), 0..16)) {
            let mut slo = SloHeaders::default();
            slo.offer(b"x-slo-tpot-ms", &value);
            match slo.read() {
                Ok(requested) => prop_assert!(requested.slo.tpot_us.is_some_and(|us| (1..=3_600_000_000).contains(&us))),
                Err(unreadable) => prop_assert_eq!(unreadable.header, "x-slo-tpot-ms"),
            }
        }
    }
}
