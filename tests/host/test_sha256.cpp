#include "check.h"

using namespace paged_attn::host;

namespace {

std::string hex(const Digest& digest) {
  std::string out;
  char byte[3];
  for (const uint8_t value : digest) {
    std::snprintf(byte, sizeof(byte), "%02x", value);
    out += byte;
  }
  return out;
}

void test_known_answers() {  // FIPS 180-4 examples
  CHECK(hex(sha256("", 0)) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256("abc", 3)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  CHECK(hex(sha256(two.data(), two.size())) == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  const std::string million(1000000, 'a');
  CHECK(hex(sha256(million.data(), million.size())) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

void test_both_codes_agree() {
  std::string text;
  for (int size = 0; size < 300; ++size, text += static_cast<char>(37 * size)) {
    sha256_use_instructions(false);
    const Digest portable = sha256(text.data(), text.size());
    sha256_use_instructions(true);
    CHECK(sha256(text.data(), text.size()) == portable);
  }
}

void test_block_key_is_the_hash_of_tagged_fields() {
  for (const int block_size : {1, 3, 4, 15, 16, 17, 32, 100}) {
    const Tokens tokens = range(1000, 1000 + block_size);
    const Digest parent = root_key({"tenant"});
    std::string message(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
    const uint32_t count = static_cast<uint32_t>(block_size);
    message += std::string("T\0\0\0", 4) + std::string(reinterpret_cast<const char*>(&count), 4);
    message += std::string("P\0\0\0\0\0\0\0", 8);
    message.append(parent.begin(), parent.end());
    CHECK(block_key(parent, tokens.data(), block_size) == sha256(message.data(), message.size()));
  }
}

void test_no_salt_differs_from_every_salt() {
  CHECK(root_key({}) != root_key({""}));
  CHECK(root_key({}) != root_key({"N"}));
  CHECK(root_key({"a"}) != root_key({"b"}));
  CHECK(root_key({"a"}) == root_key({"a"}));
}

}  // namespace

int main() {
  for (const bool instructions : {false, true}) {
    sha256_use_instructions(instructions);
    test_known_answers();
  }
  test_both_codes_agree();
  test_block_key_is_the_hash_of_tagged_fields();
  test_no_salt_differs_from_every_salt();
}
