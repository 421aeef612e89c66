//! The file system and device of a data directory: block sizes, direct I/O, synced writes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::Finding;
use crate::io::buf::AppendBuf;
use crate::io::uring::now;
use crate::limits::BLOCK;

/// Largest frame grain; a file system that claims bigger blocks (network ones do) is not asked to write them whole.
const MAX_GRAIN: u64 = 64 << 10;

/// Block sizes around a data directory, in bytes; 0 where the kernel does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockSizes {
    /// Alignment of memory for direct I/O (statx, Linux 6.1).
    pub direct_memory: u32,
    /// Alignment of positions and lengths for direct I/O (statx, Linux 6.1).
    pub direct_offset: u32,
    /// Physical block of the device.
    pub physical: u64,
    /// Block of the file system.
    pub file_system: u64,
}

impl BlockSizes {
    /// Alignment that direct I/O needs, and the least journal frame grain: a power of two from 4096 to 65536.
    #[must_use]
    pub fn grain(&self) -> usize {
        let sizes = [
            BLOCK as u64,
            u64::from(self.direct_memory),
            u64::from(self.direct_offset),
            self.physical,
            self.file_system,
        ];
        let largest = sizes.into_iter().fold(0, u64::max).min(MAX_GRAIN);
        largest.next_power_of_two() as usize
    }
}

/// Block sizes of the file system and device that hold `dir`.
///
/// # Errors
/// When no file can be made in `dir`.
pub fn block_sizes(dir: &Path) -> io::Result<BlockSizes> {
    let file = scratch_file(dir, 0)?;
    let stat = statx(&file)?;
    let told = stat.stx_mask & libc::STATX_DIOALIGN != 0;
    Ok(BlockSizes {
        direct_memory: if told { stat.stx_dio_mem_align } else { 0 },
        direct_offset: if told { stat.stx_dio_offset_align } else { 0 },
        physical: physical_block(stat.stx_dev_major, stat.stx_dev_minor),
        file_system: file_system_block(&file)?,
    })
}

/// A file without a name in `dir`, or with one that is removed at once where the file system needs one.
fn scratch_file(dir: &Path, flags: i32) -> io::Result<File> {
    let unnamed = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE | flags)
        .open(dir);
    match unnamed.as_ref().map_err(io::Error::raw_os_error) {
        Err(Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)) => {}
        _ => return unnamed,
    }
    let path = dir.join(format!(".probe-{}-{}", std::process::id(), thread_id()));
    let named = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .custom_flags(flags)
        .open(&path);
    let removed = std::fs::remove_file(&path);
    let file = named?;
    removed.map(|()| file)
}

fn thread_id() -> i32 {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::gettid() }
}

fn statx(file: &File) -> io::Result<libc::statx> {
    // SAFETY: all-zero is a valid `statx`; the empty path and the structure live across the call.
    let (result, stat) = unsafe {
        let mut stat: libc::statx = std::mem::zeroed();
        let mask = libc::STATX_BASIC_STATS | libc::STATX_DIOALIGN;
        let result = libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            mask,
            &raw mut stat,
        );
        (result, stat)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(stat)
}

fn file_system_block(file: &File) -> io::Result<u64> {
    Ok(u64::try_from(statfs(file)?.f_bsize).unwrap_or(0))
}

fn statfs(file: &File) -> io::Result<libc::statfs> {
    // SAFETY: all-zero is a valid `statfs`, which lives across the call.
    let (result, stat) = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        (libc::fstatfs(file.as_raw_fd(), &raw mut stat), stat)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(stat)
}

/// Physical block of a block device or of the disk that a partition is on; 0 when it has none (tmpfs, overlay).
fn physical_block(major: u32, minor: u32) -> u64 {
    let device = format!("/sys/dev/block/{major}:{minor}");
    ["queue", "../queue"]
        .iter()
        .find_map(|queue| {
            let text = std::fs::read_to_string(format!("{device}/{queue}/physical_block_size")).ok()?;
            text.trim().parse().ok()
        })
        .unwrap_or(0)
}

/// Everything there is to say about `dir`.
pub(super) fn findings(dir: &Path) -> Vec<Finding> {
    let file = match scratch_file(dir, 0) {
        Ok(file) => file,
        Err(error) => {
            let fix = format!("create {} and give this user write permission", dir.display());
            return vec![Finding::fail("data directory", error.to_string(), fix)];
        }
    };
    let mut findings = vec![Finding::ok(
        "data directory",
        format!("{} is writable", dir.display()),
    )];
    findings.push(match statfs(&file) {
        Ok(stat) => file_system(stat.f_type as u64),
        Err(error) => Finding::warn("file system", error.to_string(), "check the mount".to_owned()),
    });
    match block_sizes(dir) {
        Ok(sizes) => {
            findings.push(blocks(&sizes));
            findings.push(direct_io(dir, sizes.grain()));
        }
        Err(error) => findings.push(Finding::fail(
            "block sizes",
            error.to_string(),
            "check the mount".to_owned(),
        )),
    }
    if let Ok(stat) = statx(&file) {
        findings.extend(write_cache(stat.stx_dev_major, stat.stx_dev_minor));
    }
    findings
}

/// File systems by the magic number of statfs(2), and what speaks against them.
const FILE_SYSTEMS: [(u64, &str, Option<&str>); 9] = [
    (0xef53, "ext4", None),
    (0x5846_5342, "xfs", None),
    (0x0102_1994, "tmpfs", Some(IN_MEMORY)),
    (0x8584_58f6, "ramfs", Some(IN_MEMORY)),
    (
        0x9123_683e,
        "btrfs",
        Some("it copies on write: synced overwrites are slow; use XFS or ext4"),
    ),
    (
        0x2fc1_2fc1,
        "zfs",
        Some("it copies on write: synced overwrites are slow; use XFS or ext4"),
    ),
    (
        0x6969,
        "nfs",
        Some("durability depends on the server; use a local device"),
    ),
    (
        0x6573_5546,
        "fuse",
        Some("durability depends on its daemon; use XFS or ext4 on a local device"),
    ),
    (
        0x794c_7630,
        "overlayfs",
        Some("mount a volume of XFS or ext4 on the data directory"),
    ),
];

const IN_MEMORY: &str = "its content is lost with the power: for tests only";

fn file_system(magic: u64) -> Finding {
    match FILE_SYSTEMS.iter().find(|(known, ..)| *known == magic) {
        Some((_, name, None)) => Finding::ok("file system", (*name).to_owned()),
        Some((_, name, Some(fix))) => Finding::warn("file system", (*name).to_owned(), (*fix).to_owned()),
        None => Finding::warn(
            "file system",
            format!("unknown (magic {magic:#x})"),
            "Ringfence is tested on XFS and ext4".to_owned(),
        ),
    }
}

/// Name of the file system that holds `path`, for reports.
///
/// # Errors
/// When the path cannot be opened.
pub fn file_system_name(path: &Path) -> io::Result<String> {
    let magic = statfs(&File::open(path)?)?.f_type as u64;
    let known = FILE_SYSTEMS.iter().find(|(known, ..)| *known == magic);
    Ok(known.map_or_else(|| format!("{magic:#x}"), |(_, name, _)| (*name).to_owned()))
}

/// The block device under `path`, as `name (model)`; `None` when there is none (tmpfs, overlay).
///
/// # Errors
/// When the path cannot be opened.
pub fn device_name(path: &Path) -> io::Result<Option<String>> {
    let stat = statx(&File::open(path)?)?;
    let device = format!("/sys/dev/block/{}:{}", stat.stx_dev_major, stat.stx_dev_minor);
    let Ok(target) = std::fs::read_link(&device) else {
        return Ok(None);
    };
    let name = target.file_name().map(|name| name.to_string_lossy().into_owned());
    let model = ["device/model", "../device/model"]
        .iter()
        .find_map(|model| std::fs::read_to_string(format!("{device}/{model}")).ok());
    Ok(name.map(|name| match model {
        Some(model) => format!("{name} ({})", model.trim()),
        None => name,
    }))
}

fn blocks(sizes: &BlockSizes) -> Finding {
    let direct = match (sizes.direct_memory, sizes.direct_offset) {
        (0, 0) => "direct I/O alignment unknown".to_owned(),
        (memory, offset) => format!("direct I/O aligned to {offset} (memory {memory})"),
    };
    let found = format!(
        "{direct}, device block {}, file system block {}: journal grain {}",
        sizes.physical,
        sizes.file_system,
        sizes.grain()
    );
    Finding::ok("block sizes", found)
}

/// Synced writes timed by [`direct_io`].
const TRIALS: usize = 32;

/// Writes, times and reads back blocks the way the journal does.
fn direct_io(dir: &Path, grain: usize) -> Finding {
    const NAME: &str = "direct synced writes";
    let (flags, what) = (libc::O_DIRECT | libc::O_DSYNC, "O_DIRECT | O_DSYNC");
    let file = match scratch_file(dir, flags) {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            let fix = "put the data directory on XFS or ext4; files are buffered until then";
            return Finding::warn(
                NAME,
                "the file system refuses O_DIRECT".to_owned(),
                fix.to_owned(),
            );
        }
        Err(error) => return Finding::fail(NAME, error.to_string(), format!("needs {what}")),
    };
    match synced_writes(&file, grain) {
        Ok(median) => Finding::ok(
            NAME,
            format!(
                "{what} of {grain} bytes: {} us (median of {TRIALS})",
                median / 1000
            ),
        ),
        // The journal has its space already: a full disk refuses new records and nothing else.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => Finding::warn(
            NAME,
            "not tried: the file system is full".to_owned(),
            "free space; until then new records are refused".to_owned(),
        ),
        Err(error) => Finding::fail(
            NAME,
            error.to_string(),
            "check the device and its kernel messages".to_owned(),
        ),
    }
}

/// Median time of overwriting a block durably, in nanoseconds. `Err` too when other bytes come back.
fn synced_writes(file: &File, grain: usize) -> io::Result<u64> {
    let mut buf = AppendBuf::with_capacity(grain);
    let mut times = Vec::with_capacity(TRIALS);
    // The first write allocates the block; the others overwrite it, as the journal does.
    for trial in 0..=TRIALS {
        buf.spare()[..grain].fill(trial as u8 + 1);
        let start = now().mono;
        file.write_all_at(&buf.spare()[..grain], 0)?;
        times.push(now().mono.saturating_sub(start));
    }
    let mut back = AppendBuf::with_capacity(grain);
    file.read_exact_at(&mut back.spare()[..grain], 0)?;
    if back.spare()[..grain] != buf.spare()[..grain] {
        return Err(io::Error::other(
            "a block read back differs from what was written",
        ));
    }
    times.remove(0);
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn write_cache(major: u32, minor: u32) -> Option<Finding> {
    let device = format!("/sys/dev/block/{major}:{minor}");
    let mode = ["queue", "../queue"]
        .iter()
        .find_map(|queue| std::fs::read_to_string(format!("{device}/{queue}/write_cache")).ok())?;
    let found = match mode.trim() {
        "write back" => {
            "volatile: every synced write flushes it (a drive with power-loss protection needs no flush)"
        }
        "write through" => {
            "none, or protected: the kernel sends no flushes and relies on the device for that"
        }
        other => other,
    };
    Some(Finding::ok("write cache", found.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn the_grain_is_the_largest_block_within_bounds() {
        let grain = |direct_offset, physical, file_system| {
            BlockSizes {
                direct_memory: 4,
                direct_offset,
                physical,
                file_system,
            }
            .grain()
        };
        assert_eq!(grain(0, 0, 0), 4096);
        assert_eq!(grain(512, 512, 1024), 4096);
        assert_eq!(grain(512, 16384, 4096), 16384);
        assert_eq!(grain(5000, 512, 4096), 8192);
        assert_eq!(grain(512, 512, 1 << 20), 65536);
    }

    #[test]
    fn volatile_file_systems_are_named() {
        assert_eq!(file_system(0xef53).verdict, Verdict::Ok);
        for magic in [0x0102_1994, 0x6969, 7] {
            let finding = file_system(magic);
            assert_eq!(finding.verdict, Verdict::Warn);
            assert!(!finding.fix.is_empty());
        }
    }

    #[test]
    fn a_good_directory_is_written_and_read_back() {
        let dir = tempfile::TempDir::new().unwrap();
        let findings = findings(dir.path());
        let find = |name| findings.iter().find(|finding| finding.name == name).unwrap();
        assert_eq!(find("data directory").verdict, Verdict::Ok);
        assert_ne!(find("direct synced writes").verdict, Verdict::Fail);
        assert!(find("block sizes").found.contains("journal grain"));
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "nothing stays behind"
        );
    }

    #[test]
    fn a_missing_directory_is_a_failure_with_a_way_out() {
        let dir = tempfile::TempDir::new().unwrap();
        let [finding] = &findings(&dir.path().join("missing"))[..] else {
            panic!("one finding")
        };
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.fix.contains("missing"));
    }
}
