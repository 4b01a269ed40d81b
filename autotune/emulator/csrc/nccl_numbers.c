/* NCCL: its types, and reductions of their numbers. */
#include "nccl.h"

enum {
  INT8 = 0,
  UINT8 = 1,
  INT32 = 2,
  UINT32 = 3,
  INT64 = 4,
  UINT64 = 5,
  HALF = 6,
  FLOAT = 7,
  DOUBLE = 8,
  BFLOAT16 = 9,
};
enum { MOST_FLOAT_BYTES = 64 << 10, MOST_INTEGER_BYTES = 64 << 20 }; /* that are carried */

/* Behind bfloat16: two of eight bits. */
static const unsigned char TYPE_SIZE[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

size_t emu_nccl_size_of(int type) {
  int is_known = type >= 0 && type < (int)sizeof TYPE_SIZE;
  return is_known ? TYPE_SIZE[type] : 4;
}

int emu_nccl_is_carried(size_t bytes, int type) {
  int is_integer = type <= UINT64;
  return bytes <= (size_t)(is_integer ? MOST_INTEGER_BYTES : MOST_FLOAT_BYTES);
}

/* 1. Half precision: sign, exponent and mantissa of 16 bits and of a float's 32. */

static float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float from_half(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (!exponent) return (sign ? -1 : 1) * (mantissa * 5.9604645e-8f); /* 2^-24 */
  uint32_t float_exponent = exponent == 31 ? 0x7f800000 : (exponent + 112) << 23;
  return from_bits(sign | float_exponent | mantissa << 13);
}

static uint16_t to_half(float value) {
  uint32_t bits = bits_of(value);
  int sign = bits >> 16 & 0x8000, exponent = (int)(bits >> 23 & 255) - 112;
  if (exponent <= 0) return sign;
  if (exponent >= 31) return sign | 0x7c00;
  return sign | exponent << 10 | (bits >> 13 & 1023);
}

static float from_bfloat(uint16_t bfloat) { return from_bits((uint32_t)bfloat << 16); }

static uint16_t to_bfloat(float value) {
  uint32_t bits = bits_of(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to the nearest, ties to even */
}

/* 2. Numbers of every type, in the widest one: 64 bits of mantissa hold any integer here. */

static long double read_number(const void *numbers, size_t i, int type) {
  switch (type) {
    case INT8: return ((const int8_t *)numbers)[i];
    case UINT8: return ((const uint8_t *)numbers)[i];
    case INT32: return ((const int32_t *)numbers)[i];
    case UINT32: return ((const uint32_t *)numbers)[i];
    case INT64: return ((const int64_t *)numbers)[i];
    case UINT64: return ((const uint64_t *)numbers)[i];
    case HALF: return from_half(((const uint16_t *)numbers)[i]);
    case FLOAT: return ((const float *)numbers)[i];
    case DOUBLE: return ((const double *)numbers)[i];
    case BFLOAT16: return from_bfloat(((const uint16_t *)numbers)[i]);
    default: return 0;
  }
}

static void write_number(void *numbers, size_t i, int type, long double value) {
  switch (type) {
    case INT8: ((int8_t *)numbers)[i] = value; break;
    case UINT8: ((uint8_t *)numbers)[i] = value; break;
    case INT32: ((int32_t *)numbers)[i] = value; break;
    case UINT32: ((uint32_t *)numbers)[i] = value; break;
    case INT64: ((int64_t *)numbers)[i] = value; break;
    case UINT64: ((uint64_t *)numbers)[i] = value; break;
    case HALF: ((uint16_t *)numbers)[i] = to_half(value); break;
    case FLOAT: ((float *)numbers)[i] = value; break;
    case DOUBLE: ((double *)numbers)[i] = value; break;
    case BFLOAT16: ((uint16_t *)numbers)[i] = to_bfloat(value); break;
  }
}

/* 3. Reductions. */

static long double combine(long double a, long double b, int operation) {
  switch (operation) {
    case PRODUCT: return a * b;
    case MAX: return a > b ? a : b;
    case MIN: return a < b ? a : b;
    default: return a + b;
  }
}

void emu_nccl_reduce(Communicator *communicator, char *to, size_t offset, size_t bytes, int type,
                     int operation) {
  const Room *room = communicator->room;
  for (size_t i = 0; i < bytes / emu_nccl_size_of(type); i++) {
    long double value = read_number(room->slot[0] + offset, i, type);
    for (int rank = 1; rank < communicator->size; rank++)
      value = combine(value, read_number(room->slot[rank] + offset, i, type), operation);
    if (operation == AVERAGE) value /= communicator->size;
    write_number(to, i, type, value);
  }
}
