//! Reads and replaces whole files, even in folders where others may write.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The maximum number of attempts to create the temporary file. Each attempt removes a file of
/// another process that is in the way. One such file may be left over from a crash, and a second
/// file may be from another writer at the same time.
const ATTEMPTS_MAX: usize = 3;

/// Opens a regular file. A named pipe at `path` does not block.
///
/// # Errors
/// Returns the error of the file system, or says that `path` is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("not a regular file"))
    }
}

/// Reads a regular file of at most `bytes_max`.
///
/// # Errors
/// Returns the error of the file system, or says that the file is not a regular file or is too
/// large.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?
        .take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > bytes_max {
        return Err(io::Error::other(format!("larger than {bytes_max} bytes")));
    }
    Ok(bytes)
}

/// Reads a text of at most `bytes_max`.
///
/// # Errors
/// Fails as [`read`] does, and if the text is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    String::from_utf8(read(path, bytes_max)?).map_err(io::Error::other)
}

/// Replaces the file at `path` atomically. A reader, or the next start after a crash, finds the old
/// or the new file, never a part of one. No link is followed. A link at `path` is replaced, and
/// `temporary`, in the same folder, is always a new file.
///
/// # Errors
/// Returns the error of the file system. In this case the old file is intact.
pub fn replace(path: &Path, temporary: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut file = create(temporary, mode)?;
    // The umask of the process may have removed bits of the mode when the file was created.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(temporary, path)
}

/// Returns the path with a suffix.
#[must_use]
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Creates a new file, after removing whatever is at `path`.
fn create(path: &Path, mode: u32) -> io::Result<File> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let created = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(path);
        match created {
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists && attempts < ATTEMPTS_MAX =>
            {
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            created => return created,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_are_replaced_and_never_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [path, temporary, victim] =
            ["f", "f.new", "victim"].map(|name| folder.path().join(name));
        std::fs::write(&victim, "untouched").unwrap();
        for link in [&path, &temporary] {
            symlink(&victim, link).unwrap();
            replace(&path, &temporary, b"new", 0o600).unwrap();
            assert_eq!(std::fs::read_to_string(&victim).unwrap(), "untouched");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
            let meta = std::fs::symlink_metadata(&path).unwrap();
            assert_eq!(
                (meta.is_file(), meta.permissions().mode() & 0o777),
                (true, 0o600)
            );
            std::fs::remove_file(&path).unwrap();
        }
        std::fs::create_dir(&temporary).unwrap();
        assert!(replace(&path, &temporary, b"new", 0o600).is_err());
    }

    #[test]
    fn reads_end_at_the_limit_and_at_what_is_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, "1234").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"1234");
        assert!(read(&path, 3).unwrap_err().to_string().contains("larger"));
        assert!(read(folder.path(), 3).is_err());
        assert!(read(Path::new("/dev/zero"), 3).is_err());
        std::fs::write(&path, b"\xff").unwrap();
        assert!(read_text(&path, 4).is_err());
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        assert!(read(&pipe, 3).is_err(), "and it does not block");
    }
}
