//! What the kernel, the limits and the file system offer; what is missing and how to fix it.

#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

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

#[cfg(test)]
mod tests {
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
}
