// Bulk asynchronous copies and their barriers (sm_90 on), from PTX ISA: cp.async.bulk, mbarrier, griddepcontrol.
#pragma once

// Lanes that arrive at a barrier for their warp, after it has come together. With 32 compute-sanitizer's racecheck, which
// does not follow who came together, can check the ring.
constexpr int ARRIVALS = 1;

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Of copies that are about to be started; the phase does not end before the arrival that follows.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Global (of this GPU, of a peer, or mapped host memory) to shared; both ends on 16 bytes. What is read once should
// not displace what L2 holds: the cache hint is the policy evict_first, as createpolicy.fractional would make it.
__device__ __forceinline__ void bulk_load(u32 target, u64 source, u32 bytes, u32 barrier) {
    constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}

__device__ __forceinline__ void bulk_store(u64 target, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until this thread's stores have read their sources.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Until this thread's stores are done.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's accesses to shared memory before the copy engine's that follow a barrier. Without it ptxas
// moves a consumer's arrival above the multiplications that still wait for ldmatrix, and the engine overwrites rows
// while they are read.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Programmatic dependent launch: the next kernel may start its prologue; this one's may not pass before the
// kernels before it are done and their writes seen.
__device__ __forceinline__ void let_dependents_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
