// SPDX-License-Identifier: MIT
pragma solidity ^0.8.20;

/// The smallest ERC-1271 wallet: what its owner signed, it has signed.
/// For tests of sellers and payers that are contracts.
contract Wallet {
    address public owner;

    /// Set the owner, once; there is no constructor, so that the runtime code can be placed at any address.
    function init(address owner_) external {
        require(owner == address(0), "Wallet: has an owner");
        owner = owner_;
    }

    /// The owner's 65 bytes are the last of the signature. Many wallets put something before them, such as the
    /// address of a validator; a longer signature also makes callers take the token's bytes overload.
    function isValidSignature(bytes32 digest, bytes calldata signature) external view returns (bytes4) {
        if (signature.length < 65) return 0xffffffff;
        bytes calldata tail = signature[signature.length - 65:];
        bytes32 r = bytes32(tail[0:32]);
        bytes32 s = bytes32(tail[32:64]);
        address signer = ecrecover(digest, uint8(tail[64]), r, s);
        return signer != address(0) && signer == owner ? this.isValidSignature.selector : bytes4(0xffffffff);
    }
}
