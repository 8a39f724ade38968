//! Checks that bytes are UTF-8 while they arrive in pieces.

/// The state between two pieces.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Utf8Check {
    /// The beginning of a character that a piece cuts in two, and its length.
    cut: [u8; 4],
    cut_bytes: usize,
    /// The offset of the first byte that is not UTF-8, or of the character that is cut in two.
    bad: Option<usize>,
    is_bad: bool,
}

// === impl Utf8Check ===

impl Utf8Check {
    /// Whether the bytes so far end inside a character, or are known to be invalid.
    pub(super) fn is_cut(&self) -> bool {
        self.bad.is_some()
    }

    /// Checks the next bytes. The first of them has this offset.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn add(&mut self, mut bytes: &[u8], mut offset: usize) {
        while let (false, true, Some((&byte, rest))) =
            (self.is_bad, self.cut_bytes > 0, bytes.split_first())
        {
            bytes = rest;
            offset += 1;
            self.join(byte);
        }
        if self.is_bad || bytes.is_empty() {
            return;
        }
        let (whole, cut) = bytes.split_at(bytes.len() - cut_bytes(bytes));
        if simdutf8::basic::from_utf8(whole).is_err() {
            let valid = std::str::from_utf8(whole)
                .err()
                .map_or(0, |error| error.valid_up_to());
            self.bad = Some(offset + valid);
            self.is_bad = true;
        } else if !cut.is_empty() {
            self.bad = Some(offset + whole.len());
            cut.iter().for_each(|&byte| self.join(byte));
        }
    }

    /// Checks that the bytes do not end inside a character.
    ///
    /// # Errors
    /// Returns the offset of the first byte that is not UTF-8.
    pub(super) fn end(&self) -> Result<(), usize> {
        self.bad.map_or(Ok(()), Err)
    }

    /// Adds a byte to the character that is cut in two.
    #[inline(never)] // several callers, and the wasm module should be small
    fn join(&mut self, byte: u8) {
        if let Some(place) = self.cut.get_mut(self.cut_bytes) {
            *place = byte;
            self.cut_bytes += 1;
        }
        match std::str::from_utf8(self.cut.get(..self.cut_bytes).unwrap_or_default()) {
            Ok(_) => (self.bad, self.cut_bytes) = (None, 0),
            Err(error) => self.is_bad = error.error_len().is_some(),
        }
    }
}

/// Returns the length of a character at the end of `bytes` whose last bytes are missing.
fn cut_bytes(bytes: &[u8]) -> usize {
    let lead = bytes
        .iter()
        .rev()
        .take(3)
        .position(|byte| byte & 0xc0 != 0x80);
    match lead.and_then(|back| Some((back + 1, *bytes.get(bytes.len().checked_sub(back + 1)?)?))) {
        Some((1, 0xc2..=0xf4)) | Some((2, 0xe0..=0xf4)) | Some((3, 0xf0..=0xf4)) => {
            lead.map_or(0, |back| back + 1)
        }
        _ => 0,
    }
}
