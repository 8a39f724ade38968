//! Reads and writes decimal numbers. The standard library's functions are exact in every case and
//! add 35 KB to the wasm module; the functions here add 1 KB.

use std::fmt::Write as _;

/// The maximum number of significant decimal digits that always fit into a mantissa of 64 bits.
const DIGITS_MAX: u32 = 19;

/// The maximum exponent. Beyond it, every mantissa gives infinity or zero.
const EXPONENT_MAX: u32 = 400;

/// Powers of ten up to this exponent are exact in an `f64`.
const POWER_EXACT_MAX: u32 = 22;

/// The maximum number of decimal digits that an `f32` needs to differ from its neighbours.
const F32_DIGITS_MAX: i32 = 9;

/// Reads a complete number such as `-12.5e3`. Digits may be missing on one side of the point.
/// Numbers with at most 15 digits and a power of ten up to 22 are exact. Other numbers are off by a
/// few units in the last place. A number that is too large becomes infinite.
#[must_use]
pub fn parse(text: &[u8]) -> Option<f64> {
    let (negative, mut rest) = match text.split_first()? {
        (b'-', rest) => (true, rest),
        (b'+', rest) => (false, rest),
        _ => (false, text),
    };
    let mut mantissa = 0_u64;
    let mut exponent = 0_i32;
    let mut held = 0;
    let mut any = false;
    let mut after_point = false;
    while let Some((&byte, after)) = rest.split_first() {
        match byte {
            b'0'..=b'9' => {
                any = true;
                if held < DIGITS_MAX {
                    mantissa = mantissa * 10 + u64::from(byte - b'0');
                    held += u32::from(mantissa > 0);
                    exponent -= i32::from(after_point);
                } else {
                    exponent = exponent.saturating_add(i32::from(!after_point));
                }
            }
            b'.' if !after_point => after_point = true,
            _ => break,
        }
        rest = after;
    }
    let written = match rest.split_first() {
        None => 0,
        Some((b'e' | b'E', digits)) => parse_exponent(digits)?,
        Some(_) => return None,
    };
    #[expect(clippy::cast_precision_loss, reason = "more digits than a float holds")]
    let value = scale(mantissa as f64, exponent.saturating_add(written));
    any.then_some(if negative { -value } else { value })
}

fn parse_exponent(text: &[u8]) -> Option<i32> {
    let (negative, digits) = match text.split_first()? {
        (b'-', rest) => (true, rest),
        (b'+', rest) => (false, rest),
        _ => (false, text),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let exponent = digits.iter().fold(0_i32, |sum, digit| {
        sum.saturating_mul(10)
            .saturating_add(i32::from(digit - b'0'))
    });
    Some(if negative { -exponent } else { exponent })
}

/// Returns `value` times ten to the power of `exponent`.
fn scale(value: f64, exponent: i32) -> f64 {
    let mut scaled = value;
    let mut left = exponent.unsigned_abs().min(EXPONENT_MAX);
    while left > 0 && scaled != 0.0 {
        // Powers up to this exponent are exact, so the first step of a short number is exact too.
        let step = left.min(POWER_EXACT_MAX);
        let power = (0..step).fold(1.0, |power, _| power * 10.0);
        scaled = if exponent > 0 {
            scaled * power
        } else {
            scaled / power
        };
        left -= step;
    }
    scaled
}

/// Writes the shortest decimal number that gives `value` when it is read. `value` must be finite.
pub fn write(out: &mut String, value: f32) {
    let size = f64::from(value.abs());
    // Estimate the decimal exponent from the binary exponent. The estimate is right or one too low,
    // so the first try has one digit or none.
    let decade = if value == 0.0 {
        0
    } else {
        (((size.to_bits() >> 52) as i32 - 1_023) * 30_103).div_euclid(100_000)
    };
    for digits in 0..=F32_DIGITS_MAX {
        let places = digits - 1 - decade;
        let rounded = scale(size, places).round();
        #[expect(clippy::cast_possible_truncation, reason = "this is what is compared")]
        let is_same = scale(rounded, -places) as f32 == value.abs();
        if is_same || digits == F32_DIGITS_MAX {
            return write_decimal(out, value < 0.0, rounded, places);
        }
    }
}

/// Writes `value` rounded to this many decimal places, without zeros at the end.
pub fn write_rounded(out: &mut String, value: f32, places: i32) {
    let rounded = scale(f64::from(value.abs()), places).round();
    // Above this value, a float has no decimal places.
    if rounded >= 1e15 {
        return write(out, value);
    }
    write_decimal(out, value < 0.0 && rounded > 0.0, rounded, places);
}

/// Writes the whole number `digits`, at most 10^15, divided by ten to the power of `places`.
fn write_decimal(out: &mut String, negative: bool, digits: f64, places: i32) {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "within 10^15, and not negative"
    )]
    let mut digits = digits as u64;
    let mut places = places;
    while places > 0 && digits.is_multiple_of(10) {
        digits /= 10;
        places -= 1;
    }
    if negative {
        out.push('-');
    }
    let start = out.len();
    let _ = write!(out, "{digits}"); // writing to a String cannot fail
    let zeros = |count: i32| std::iter::repeat_n('0', usize::try_from(count).unwrap_or(0));
    if digits > 0 {
        out.extend(zeros(-places));
    }
    let places = usize::try_from(places).unwrap_or(0);
    if places > 0 {
        let written = out.len() - start;
        if written <= places {
            out.insert_str(
                start,
                &zeros(i32::try_from(places + 1 - written).unwrap_or(0)).collect::<String>(),
            );
        }
        out.insert(out.len() - places, '.');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(value: f32) -> String {
        let mut out = String::new();
        write(&mut out, value);
        out
    }

    fn rounded(value: f32) -> String {
        let mut out = String::new();
        write_rounded(&mut out, value, 4);
        out
    }

    #[test]
    fn what_is_read() {
        for (text, value) in [
            ("0", 0.0),
            ("-0.5", -0.5),
            ("+7", 7.0),
            ("12.50", 12.5),
            ("1e3", 1e3),
            ("1.5E-3", 1.5e-3),
            (".5", 0.5),
            ("5.", 5.0),
        ] {
            assert_eq!(parse(text.as_bytes()), Some(value), "{text}");
        }
        assert_eq!(
            parse(b"123456789012345678901234567890"),
            Some(1.234_567_890_123_456_8e29)
        );
        assert_eq!(parse(b"1e999999999999"), Some(f64::INFINITY));
        assert_eq!(parse(b"1e-999999999999"), Some(0.0));
        assert_eq!(
            parse(&[b"0.".as_slice(), &[b'0'; 500], b"1e501"].concat()),
            Some(1.0)
        );
        for text in [
            "", "-", ".", "e5", "1e", "1e+", "1.2.3", " 1", "1 ", "nan", "inf", "0x10", "1_000",
            "--1",
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn what_is_written() {
        for (value, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (1.0, "1"),
            (-2.5, "-2.5"),
            (0.1, "0.1"),
            (100.0, "100"),
            (16_777_216.0, "16777216"),
        ] {
            assert_eq!(written(value), text);
        }
        for (value, text) in [
            (0.0, "0"),
            (0.123_456, "0.1235"),
            (-0.000_01, "0"),
            (-1.5, "-1.5"),
            (1_000.0, "1000"),
            (0.05, "0.05"),
            (1e20, "1e20"),
        ] {
            assert_eq!(rounded(value).parse::<f32>(), text.parse(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_float_is_written_as_the_standard_library_does(bits: u32) {
            let value = f32::from_bits(bits);
            prop_assume!(value.is_normal());
            prop_assert_eq!(written(value), value.to_string());
        }

        #[test]
        fn a_tiny_float_is_read_again(bits in 1_u32..0x0080_0000) {
            let value = f32::from_bits(bits);
            prop_assert_eq!(written(value).parse::<f32>().unwrap(), value);
        }

        #[test]
        fn short_numbers_are_exact(mantissa in 0_u64..1_000_000_000_000_000, exponent in -22_i32..=22) {
            let text = format!("{mantissa}e{exponent}");
            prop_assert_eq!(parse(text.as_bytes()), Some(text.parse::<f64>().unwrap()));
        }

        #[test]
        fn others_are_next_to_exact(value: f64) {
            prop_assume!(value.is_normal());
            for text in [value.to_string(), format!("{value:e}")] {
                let read = parse(text.as_bytes()).unwrap();
                prop_assert!(((read - value) / value).abs() < 1e-13, "{} read as {}", text, read);
            }
        }

        #[test]
        fn what_is_no_number_is_none(text in "[-+0-9.eE]{0,8}") {
            let std = text.parse::<f64>().ok();
            prop_assert_eq!(parse(text.as_bytes()).is_some(), std.is_some(), "{}", text);
        }
    }
}
