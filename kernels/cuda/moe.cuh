/* Which rows chose which experts, on the device: the host never waits for it. */
#ifndef QKV_CUDA_MOE_CUH
#define QKV_CUDA_MOE_CUH

#include "device.cuh"

/* Places [first, end) of one expert; none of them: past the last tile. */
struct qkv_cuda_moe_tile {
    int32_t expert;
    int32_t first;
    int32_t end;
};

/* A row has `width` places: its chosen experts, the shared one last. Places lie by expert and, of
 * one expert, by row. All arrays are on the device. */
struct qkv_cuda_moe_plan {
    int32_t *chosen;                 /* [n_rows, width] */
    float *weights;                  /* [n_rows, width] */
    int32_t *position;               /* [n_rows, width]: the place */
    int32_t *row_of;                 /* [n_places] */
    int32_t *expert_of;              /* [n_places] */
    int32_t *first;                  /* [n_all + 1]: of an expert's places */
    struct qkv_cuda_moe_tile *tiles; /* [n_tiles] */
    int32_t n_rows;
    int32_t n_all; /* experts, the shared one included */
    int32_t width;
    int32_t n_places;
    int32_t tile_rows;
    int32_t n_tiles; /* at least as many as there can be */
};

/* moe_plan.cu. Tiles are of up to tile_rows places. */
enum qkv_status qkv_cuda_moe_route(struct qkv_error *err, struct qkv_device *dev,
                                   const struct qkv_moe *args, int32_t tile_rows,
                                   struct qkv_cuda_moe_plan *out);

#endif
